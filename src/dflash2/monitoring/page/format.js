// Figures for people, and small pieces of the page.

export const TIERS = ["hbm", "dram", "nvme"];
export const TIER_NAMES = { hbm: "HBM", dram: "DRAM", nvme: "NVMe" };

const UNITS = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]];

export function bytes(value) {
  for (const [size, unit] of UNITS) if (value >= size) return `${(value / size).toFixed(1)} ${unit}`;
  return `${Math.round(value)} B`;
}

export const count = (value) => Math.round(value).toLocaleString("en-US");
export const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
export const share = (part, whole) => (whole > 0 ? part / whole : 0);

export function seconds(value) {
  if (value >= 1) return `${value.toFixed(value < 10 ? 2 : 0)} s`;
  return value >= 1e-3 ? `${(1000 * value).toFixed(0)} ms` : `${(1e6 * value).toFixed(0)} µs`;
}

export const byId = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// A list of [term, figure] pairs; only figures that changed are touched.
export function definitions(list, pairs) {
  const terms = pairs.map(([term]) => term).join("|");
  if (list.dataset.terms !== terms) {
    list.dataset.terms = terms;
    list.replaceChildren(...pairs.flatMap(([term]) => [make("dt", {}, term), make("dd")]));
  }
  list.querySelectorAll("dd").forEach((place, at) => setText(place, String(pairs[at][1])));
}

export function setText(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

// A bar of parts [class, label, value], as shares of a whole, with its key below.
export function stackedBar(place, label, parts, whole, text = count) {
  const bar = make("div", { class: "bar", role: "img", "aria-label": `${label}: ${parts.map(
    ([, name, value]) => `${name} ${text(value)}`).join(", ")}` });
  for (const [kind, , value] of parts) {
    const piece = make("span", { class: `is-${kind}` });
    piece.style.width = `${100 * share(value, whole)}%`;
    bar.append(piece);
  }
  const key = make("ul", { class: "key" });
  for (const [kind, name, value] of parts) key.append(make("li", { class: `is-${kind}` }, `${name} ${text(value)}`));
  place.replaceChildren(bar, key);
}
