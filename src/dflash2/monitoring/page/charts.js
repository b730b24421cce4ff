// Curves and histograms as SVG. Colours come from the style sheet by class.

const NAMESPACE = "http://www.w3.org/2000/svg";
const WIDTH = 420, HEIGHT = 150, LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 20;

function svg(tag, attributes, text = "") {
  const element = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  return element;
}

function frame(label) {
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
}

function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value) * power;
}

const clock = (time, span) =>
  new Date(1000 * time).toLocaleString([], span > 86400
    ? { weekday: "short", hour: "2-digit", minute: "2-digit" } : { hour: "2-digit", minute: "2-digit", second: "2-digit" });

// lines: [{ kind, name, values }], values beside times, null for a gap.
export function lineChart({ title, times, lines, text, top, from, to }) {
  const highest = top ?? niceTop(Math.max(0, ...lines.flatMap((line) => line.values.filter((value) => value !== null))));
  const x = (time) => LEFT + (WIDTH - LEFT - RIGHT) * (time - from) / Math.max(1, to - from);
  const y = (value) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * Math.min(1, value / highest);
  const last = lines.map(({ name, values }) => `${name} ${newest(values, text)}`).join(", ");
  const chart = frame(`${title}, newest values: ${last}`);
  for (const part of [0, 0.5, 1]) {
    const level = y(part * highest);
    chart.append(svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: level, y2: level }));
    chart.append(svg("text", { x: LEFT - 5, y: level + 4, "text-anchor": "end" }, text(part * highest)));
  }
  chart.append(svg("text", { x: LEFT, y: HEIGHT - 5 }, clock(from, to - from)));
  chart.append(svg("text", { x: WIDTH - RIGHT, y: HEIGHT - 5, "text-anchor": "end" }, clock(to, to - from)));
  for (const { kind, values } of lines) {
    for (const piece of pieces(times, values)) {
      const points = piece.map(([time, value]) => `${x(time).toFixed(1)},${y(value).toFixed(1)}`);
      chart.append(piece.length > 1
        ? svg("polyline", { class: `is-${kind}`, points: points.join(" ") })
        : svg("circle", { class: `is-${kind}`, cx: x(piece[0][0]), cy: y(piece[0][1]), r: 1.5 }));
    }
  }
  return chart;
}

export function newest(values, text) {
  const value = values.findLast((one) => one !== null);
  return value === undefined ? "–" : text(value);
}

// Runs of neighbouring values.
function pieces(times, values) {
  const found = [];
  values.forEach((value, at) => {
    if (value === null) return;
    if (at === 0 || values[at - 1] === null) found.push([]);
    found.at(-1).push([times[at], value]);
  });
  return found;
}

// parts: [[kind, counts]] stacked; bins are equally wide in [0, 1].
export function histogram(title, parts, text) {
  const bins = parts[0][1].length;
  const totals = Array.from({ length: bins }, (_, at) => parts.reduce((sum, [, counts]) => sum + counts[at], 0));
  const highest = niceTop(Math.max(...totals));
  const chart = frame(`${title}: ${totals.map((total, at) => `${at / bins} to ${(at + 1) / bins}: ${total}`).join(", ")}`);
  const width = (WIDTH - LEFT - RIGHT) / bins, room = HEIGHT - TOP - BOTTOM;
  for (const part of [0, 0.5, 1]) {
    const level = HEIGHT - BOTTOM - part * room;
    chart.append(svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: level, y2: level }));
    chart.append(svg("text", { x: LEFT - 5, y: level + 4, "text-anchor": "end" }, text(part * highest)));
  }
  for (let at = 0; at < bins; at += 1) {
    let floor = HEIGHT - BOTTOM;
    for (const [kind, counts] of parts) {
      const height = room * counts[at] / highest;
      floor -= height;
      chart.append(svg("rect", { class: `is-${kind}`, x: LEFT + at * width + 1, y: floor, width: width - 2, height }));
    }
  }
  for (const mark of [0, 0.5, 1]) {
    const x = LEFT + mark * (WIDTH - LEFT - RIGHT);
    chart.append(svg("text", { x, y: HEIGHT - 5, "text-anchor": "middle" }, String(mark)));
  }
  return chart;
}
