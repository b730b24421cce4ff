// Curves: from the server's history where it keeps one, else from what this page has seen since it was opened.

import { lineChart, newest } from "./charts.js";
import { byId, bytes, count, make, percent, seconds, TIERS, TIER_NAMES } from "./format.js";

const perTier = (suffix) => TIERS.map((tier) => [tier, TIER_NAMES[tier], suffix(tier)]);

const CHARTS = [
  { title: "Blocks in use", text: count, lines: perTier((tier) => `${tier}_used_blocks`) },
  { title: "Swapped per second", text: bytes,
    lines: [["hbm", "in", "swap_in_bytes_per_s"], ["dram", "out", "swap_out_bytes_per_s"]] },
  { title: "Uses that found their block in HBM", text: (value) => percent(value, 0), top: 1, lines: [["hbm", "hit rate", "hbm_hit_ratio"]] },
  { title: "Prompt tokens cached, by origin", text: (value) => percent(value, 0), top: 1,
    lines: perTier((tier) => `prefix_hit_${tier}_ratio`) },
  { title: "Requests", text: count,
    lines: [["bad", "waiting", "requests_waiting"], ["dram", "paused", "requests_paused"], ["hbm", "in HBM", "requests_resident"]] },
  { title: "Tokens per second", text: count,
    lines: [["good", "computed", "computed_tokens_per_s"], ["bad", "recomputed", "recomputed_tokens_per_s"]] },
  { title: "Prefetched blocks per second", text: (value) => value.toFixed(1),
    lines: [["good", "used", "prefetch_used_blocks_per_s"], ["late", "late", "prefetch_late_blocks_per_s"], ["bad", "wasted", "prefetch_wasted_blocks_per_s"]] },
  { title: "NVMe latency", text: seconds, lines: [["nvme", "load", "nvme_load_seconds"], ["late", "store", "nvme_store_seconds"]] },
  { title: "Memory headroom of the machine", text: bytes, lines: [["good", "headroom", "host_memory_headroom_bytes"]] },
];
const SPANS = { "10m": 600, "3h": 10800, "3d": 259200 };

const own = { times: [], rows: [] };

export function showCurves(history, span) {
  const times = history.times;
  const to = times.at(-1) ?? Date.now() / 1000;
  const from = Math.max(to - SPANS[span], times[0] ?? to - SPANS[span]);
  byId("curves").replaceChildren(...CHARTS.map(({ title, text, lines, top }) => {
    const drawn = lines.map(([kind, name, series]) => ({ kind, name, values: history.series[series] ?? [] }));
    const key = make("ul", { class: "key" });
    for (const { kind, name, values } of drawn) key.append(make("li", { class: `is-${kind}` }, `${name} ${newest(values, text)}`));
    return make("figure", {}, make("figcaption", {}, title), lineChart({ title, times, lines: drawn, text, top, from, to }), key);
  }));
}

// Where the server keeps no history: one point for each time the page asked.
export function remember(now, before) {
  const { counters: new_ } = now, old = before?.counters, passed = before ? now.time - before.time : 0;
  const grown = (name) => (old ? new_[name] - old[name] : null);
  const per = (name) => (passed > 0 ? grown(name) / passed : null);
  const part = (name, whole) => (old && grown(whole) > 0 ? grown(name) / grown(whole) : null);
  const row = {
    swap_in_bytes_per_s: per("swap_in_bytes"), swap_out_bytes_per_s: per("swap_out_bytes"),
    hbm_hit_ratio: part("used_in_hbm_blocks", "used_blocks"),
    requests_waiting: now.scheduler?.waiting_requests ?? 0, requests_paused: now.scheduler?.paused_requests ?? 0,
    requests_resident: now.scheduler?.resident_requests ?? 0,
    computed_tokens_per_s: per("computed_tokens"), recomputed_tokens_per_s: per("recomputed_tokens"),
    prefetch_used_blocks_per_s: per("prefetch_used_blocks"), prefetch_late_blocks_per_s: per("prefetch_late_blocks"),
    prefetch_wasted_blocks_per_s: per("prefetch_wasted_blocks"),
    nvme_load_seconds: latency(now, before, "nvme_loads"), nvme_store_seconds: latency(now, before, "nvme_stores"),
    host_memory_headroom_bytes: now.host.headroom_bytes ?? null,
  };
  for (const tier of TIERS) {
    row[`${tier}_used_blocks`] = now.tiers[tier].used_blocks;
    row[`prefix_hit_${tier}_ratio`] = part(`hit_tokens_${tier}`, "looked_up_tokens");
  }
  own.times.push(now.time);
  own.rows.push(row);
  if (own.times.length > 600) {
    own.times.shift();
    own.rows.shift();
  }
  const names = Object.keys(row);
  return { times: own.times, series: Object.fromEntries(names.map((name) => [name, own.rows.map((one) => one[name])])) };
}

function latency(now, before, copies) {
  if (!before) return null;
  const after = now.transfer[copies], old = before.transfer[copies];
  return after.jobs > old.jobs ? (after.latency_sum_s - old.latency_sum_s) / (after.jobs - old.jobs) : null;
}
