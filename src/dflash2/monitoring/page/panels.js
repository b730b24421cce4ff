// The panels that show statistics of this moment and what changed since the one before.

import { byId, bytes, count, definitions, make, percent, seconds, setText, share, stackedBar, TIERS, TIER_NAMES } from "./format.js";

export function showStats(now, before) {
  showState(now);
  showWarnings(now.warnings ?? []);
  showTiers(now, before);
  showHits(now);
  showQueue(now);
  showLatency(now.latency);
  showSwaps(now);
  showPrefetch(now);
  showNvme(now);
  showHost(now);
}

function showState(stats) {
  const up = stats.server?.engine_up ?? true;
  const state = byId("state");
  state.className = `pill ${up && stats.enabled ? "good" : "bad"}`;
  setText(state, !up ? "engine stopped" : stats.enabled ? "enabled" : "fallback: HBM only");
  const total = TIERS.reduce((sum, tier) => sum + stats.tiers[tier].pool_bytes, 0);
  setText(byId("sizes"), `virtual cache ${bytes(total)}, blocks of ${bytes(stats.block_bytes)}`);
}

export function showLost(error) {
  const state = byId("state");
  state.className = "pill bad";
  setText(state, `no answer: ${error.message}`);
}

function showWarnings(warnings) {
  byId("warnings").hidden = !warnings.length;
  byId("warning-list").replaceChildren(...warnings.map(({ id, text, time }) =>
    make("li", {}, make("strong", {}, id), ` (${new Date(1000 * time).toLocaleTimeString()}): ${text}`)));
}

function rate(now, before, route) {
  const passed = before ? now.time - before.time : 0;
  return passed > 0 ? (now.transfer.routes[route].bytes - before.transfer.routes[route].bytes) / passed : 0;
}

function flow(now, before, upper, lower) {
  const line = (arrow, route) => {
    const moving = rate(now, before, route);
    return make("p", moving > 0 ? { class: "moving" } : {}, `${arrow} ${bytes(moving)}/s`);
  };
  return make("div", { class: "flow", role: "group", "aria-label": `between ${TIER_NAMES[upper]} and ${TIER_NAMES[lower]}` },
    line("→", `${upper}_to_${lower}`), line("←", `${lower}_to_${upper}`));
}

function showTiers(now, before) {
  const parts = [];
  TIERS.forEach((tier, at) => {
    const { capacity_blocks: capacity, used_blocks: used, retired_blocks: retired } = now.tiers[tier];
    const box = make("div", { class: `tier is-${tier}` }, make("h3", {}, TIER_NAMES[tier]));
    if (capacity) {
      const bar = make("div", { class: "bar", role: "img", "aria-label": `${percent(share(used, capacity))} used` });
      const filled = make("span");
      filled.style.width = `${100 * share(used, capacity)}%`;
      bar.append(filled);
      box.append(bar, make("p", { id: `${tier}-used` }, `${count(used)} of ${count(capacity)} blocks`),
        make("p", { class: "quiet" }, `${bytes(used * now.block_bytes)} of ${bytes(now.tiers[tier].pool_bytes)}`
          + (retired ? `, ${count(retired)} slots retired` : "")));
    } else {
      box.append(make("p", { class: "quiet" }, "none configured"));
    }
    if (at) parts.push(flow(now, before, TIERS[at - 1], tier));
    parts.push(box);
  });
  byId("tiers").replaceChildren(...parts);
  setText(byId("direct"), `directly: HBM → NVMe ${bytes(rate(now, before, "hbm_to_nvme"))}/s, NVMe → HBM ${
    bytes(rate(now, before, "nvme_to_hbm"))}/s`);
}

function showHits(stats) {
  const { counters } = stats;
  setText(byId("hbm-hit"), percent(stats.hbm_hit_rate, 2));
  const verdict = stats.hbm_hit_rate < 0.95 ? "below 95 %: lower concurrency or give HBM more room"
    : stats.hbm_hit_rate < 0.98 ? "below 98 %: look at cold_threshold before adding concurrency" : "98 % and more is good";
  setText(byId("hits-note"), `${count(counters.used_in_hbm_blocks)} of ${count(counters.used_blocks)} uses; ${verdict}`);
  const looked = counters.looked_up_tokens;
  const hits = TIERS.map((tier) => [tier, TIER_NAMES[tier], counters[`hit_tokens_${tier}`]]);
  const missed = looked - hits.reduce((sum, [, , value]) => sum + value, 0);
  stackedBar(byId("origins"), "Prompt tokens by origin", [...hits, ["none", "not cached", missed]], looked,
    (value) => percent(share(value, looked)));
}

function showQueue(stats) {
  const scheduler = stats.scheduler ?? {};
  definitions(byId("queue"), [
    ["waiting", count(scheduler.waiting_requests ?? 0) + reasons(scheduler.wait_reasons ?? {})],
    ["paused, KV kept", count(scheduler.paused_requests ?? 0)],
    ["in HBM", count(scheduler.resident_requests ?? 0)],
    ["admitted", count(scheduler.admitted_requests ?? 0)],
    ["not admitted in time", count(scheduler.timed_out_requests ?? 0)],
    ["swapped while running", count(scheduler.preemptions_swapped ?? 0)],
    ["pinned blocks", count(stats.pinned_blocks)],
    ["reservations refused", count(stats.counters.reservations_refused)],
  ]);
  const all = TIERS.reduce((sum, tier) => sum + stats.tiers[tier].capacity_blocks, 0);
  stackedBar(byId("reserved"), "Reserved blocks",
    [["late", "reserved", stats.reserved_blocks], ["none", "not promised", Math.max(0, all - stats.reserved_blocks)]], all);
}

function reasons(waits) {
  const found = Object.entries(waits).filter(([, number]) => number);
  return found.length ? ` (${found.map(([name, number]) => `${name} ${number}`).join(", ")})` : "";
}

// The upper end of the bucket that holds the given share of the observations.
function quantile(histogram, wanted) {
  if (!histogram.count) return "–";
  const bounds = Object.keys(histogram).filter((key) => key.startsWith("le_")).map((key) => [Number(key.slice(3)), histogram[key]]);
  const found = bounds.find(([, below]) => below >= wanted * histogram.count);
  return found ? seconds(found[0]) : `more than ${seconds(bounds.at(-1)[0])}`;
}

function showLatency(latency) {
  const rows = [["queue", "in the queue"], ["ttft", "to first token"], ["tpot", "per output token"]].map(([key, name]) => {
    const one = latency?.[key] ?? { count: 0, sum_s: 0 };
    return make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, quantile(one, 0.5)), make("td", {}, quantile(one, 0.99)),
      make("td", {}, one.count ? seconds(one.sum_s / one.count) : "–"));
  });
  byId("latency").tBodies[0].replaceChildren(...rows);
}

function showSwaps({ counters, transfer, copies_in_flight: inFlight }) {
  definitions(byId("swaps"), [
    ["blocks swapped in", count(counters.swap_in_blocks)],
    ["blocks swapped out", count(counters.swap_out_blocks)],
    ["bytes in", bytes(counters.swap_in_bytes)],
    ["bytes out", bytes(counters.swap_out_bytes)],
    ["demoted to NVMe", count(counters.demoted_to_nvme_blocks)],
    ["loaded from NVMe", count(counters.loaded_from_nvme_blocks)],
    ["copies in flight", count(inFlight)],
    ["staging in use / peak", `${bytes(transfer.staging_in_use_bytes)} / ${bytes(transfer.staging_peak_bytes)}`],
    ["recomputed tokens", count(counters.recomputed_tokens)],
    ["failed copies", count(counters.failed_copies)],
  ]);
}

function showPrefetch(stats) {
  const { prefetch_used_blocks: used, prefetch_late_blocks: late, prefetch_wasted_blocks: wasted,
    prefetch_issued_blocks: issued } = stats.counters;
  stackedBar(byId("prefetch"), "Outcome of prefetches",
    [["good", "used", used], ["late", "late", late], ["bad", "wasted", wasted]], used + late + wasted);
  setText(byId("prefetch-note"), `${count(issued)} blocks fetched ahead; the window is ${stats.prefetch_window} blocks now`);
}

function mean(route) {
  return route.jobs ? seconds(route.latency_sum_s / route.jobs) : "–";
}

function showNvme({ nvme, transfer, disk, tiers }) {
  if (!tiers.nvme.capacity_blocks) {
    definitions(byId("nvme"), [["tier", "none configured"]]);
    return;
  }
  const { nvme_loads: load, nvme_stores: store } = transfer, smart = disk?.smart ?? {};
  definitions(byId("nvme"), [
    ["health", nvme.healthy ? (transfer.pressed ? "slow to write" : "ok") : "full"],
    ["load, mean / longest", `${mean(load)} / ${seconds(load.latency_max_s)}`],
    ["store, mean / longest", `${mean(store)} / ${seconds(store.latency_max_s)}`],
    ["waiting to be stored", `${count(store.queued_blocks)} blocks`],
    ["direct I/O", nvme.io_mode === "direct" ? "yes" : "no"],
    ["checksum failures", count(nvme.checksum_failures)],
    ["slots given up", count(nvme.quarantined_slots)],
    ["disk free", disk ? `${bytes(disk.free_bytes)} of ${bytes(disk.total_bytes)}` : "–"],
    ...("unreadable" in smart || !disk ? [["SMART", "not readable"]] : [
      ["temperature", `${smart.temperature_celsius} °C`],
      ["wear", percent(smart.wear_ratio, 0)],
      ["media errors", count(smart.media_errors)],
      ["disk warns", smart.critical_warning ? "yes" : "no"],
    ]),
  ]);
  setText(byId("smart-note"), smart.unreadable ?? "");
}

function showHost({ host, tiers }) {
  const limit = host.memory_limit_bytes ?? 0, left = host.headroom_bytes ?? 0, dram = tiers.dram.pool_bytes;
  stackedBar(byId("headroom"), "Memory of this process's limit", [["dram", "DRAM tier", dram],
    ["none", "other", Math.max(0, limit - left - dram)], ["good", "headroom", left]], limit, bytes);
  definitions(byId("host"), [["limit", bytes(limit)], ["headroom", `${bytes(left)} (${percent(share(left, limit), 0)})`]]);
}
