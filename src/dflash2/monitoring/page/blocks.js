// Heat of all blocks, and the hottest and coldest of them with why.

import { histogram } from "./charts.js";
import { byId, count, make, TIERS, TIER_NAMES } from "./format.js";

const COLUMNS = [
  ["block", (block) => block.block_id],
  ["heat", (block) => block.heat.toFixed(2)],
  ["on", (block) => block.tiers.map((tier) => TIER_NAMES[tier]).join(", ") || "–"],
  ["state", (block) => block.state + (block.pinned ? ", pinned" : "")],
  ["position", (block) => block.position],
  ["held by", (block) => block.holders],
  ["misses", (block) => block.misses],
  ["why", (block) => why(block.why)],
];

export function showBlocks(report) {
  const parts = TIERS.map((tier) => [tier, report.histogram[tier]]);
  const key = make("ul", { class: "key" });
  for (const [tier, counts] of parts) {
    const total = counts.reduce((sum, value) => sum + value, 0);
    key.append(make("li", { class: `is-${tier}` }, `${TIER_NAMES[tier]} ${count(total)}`));
  }
  byId("heat").replaceChildren(histogram("Blocks by heat", parts, count), key);
  fill(byId("hottest"), report.hottest);
  fill(byId("coldest"), report.coldest);
}

function fill(table, blocks) {
  if (!table.tHead.rows.length) {
    table.tHead.append(make("tr", {}, ...COLUMNS.map(([name]) => make("th", { scope: "col" }, name))));
  }
  const rows = blocks.map((block) => make("tr", {}, ...COLUMNS.map(([name, read]) =>
    make("td", name === "why" ? { class: "why" } : {}, String(read(block))))));
  if (!rows.length) rows.push(make("tr", {}, make("td", { colspan: String(COLUMNS.length) }, "no blocks yet")));
  table.tBodies[0].replaceChildren(...rows);
}

function why(reasons) {
  return Object.entries(reasons).map(([name, value]) => `${name.replaceAll("_", " ")} ${figure(value)}`).join(", ");
}

function figure(value) {
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : value.toPrecision(3);
  return value !== null && typeof value === "object" ? `(${why(value)})` : String(value);
}
