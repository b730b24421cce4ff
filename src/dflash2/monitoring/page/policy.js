// The sliders. A change is sent when the slider is let go; what the server answers is what is shown.

import { get, post } from "./api.js";
import { byId, make, setText } from "./format.js";

const SLIDERS = [
  ["cold_threshold", "cold_threshold: blocks below this heat may leave HBM", 0.01],
  ["prefetch_window", "prefetch_window: blocks fetched ahead", 1],
  ["swap_batch_size", "swap_batch_size: blocks in one burst", 1],
];

export async function setUpPolicy() {
  const state = await get("policy");
  byId("policy").replaceChildren(...SLIDERS.map(([name, label, step]) => slider(name, label, step, state.limits[name])));
  byId("policy").addEventListener("submit", (event) => event.preventDefault());
  byId("undo").addEventListener("click", () => send("policy/undo", {}));
  show(state);
}

function slider(name, label, step, [low, high]) {
  const input = make("input", { type: "range", id: name, min: low, max: high, step });
  const output = make("output", { for: name });
  input.addEventListener("input", () => setText(output, input.value));
  input.addEventListener("change", () => send("policy", { [name]: Number(input.value) }));
  return make("div", { class: "slider" }, make("label", { for: name }, label), output, input);
}

function show({ values, changes }) {
  for (const [name] of SLIDERS) {
    const input = byId(name);
    input.value = values[name];
    setText(input.parentElement.querySelector("output"), String(values[name]));
  }
  byId("undo").disabled = !changes.length;
  byId("policy-log").replaceChildren(...changes.slice().reverse().map(({ time, before, after }) =>
    make("li", {}, `${new Date(1000 * time).toLocaleTimeString()}: ${Object.keys(after).map(
      (name) => `${name} ${before[name]} → ${after[name]}`).join(", ")}`)));
}

async function send(path, body) {
  const message = byId("policy-message");
  try {
    show(await post(path, body));
    setText(message, "in effect");
  } catch (error) {
    setText(message, error.message);
    show(await get("policy"));
  }
}
