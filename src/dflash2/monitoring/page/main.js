// Asks the server in turns and hands the answers to the panels.

import { download, get, NeedsToken, setToken } from "./api.js";
import { showBlocks } from "./blocks.js";
import { remember, showCurves } from "./curves.js";
import { byId, setText } from "./format.js";
import { showLost, showStats } from "./panels.js";
import { setUpPolicy } from "./policy.js";

const STATS_MS = 2000;
const BLOCKS_EVERY = 3, CURVES_EVERY = { "10m": 1, "3h": 5, "3d": 30 };
const THEMES = ["system", "light", "dark"];

let before = null, turn = 0, ready = false;

async function round() {
  const now = await get("stats");
  showStats(now, before);
  const seen = remember(now, before);
  before = now;
  if (!ready) {
    await setUpPolicy();
    ready = true;
  }
  if (turn % BLOCKS_EVERY === 0) showBlocks(await get("blocks?count=10"));
  await updateCurves(seen);
  turn += 1;
}

async function updateCurves(seen) {
  const span = byId("span").value, kept = before.history_enabled;
  byId("span").disabled = !kept;
  byId("csv").hidden = !kept;
  setText(byId("curves-note"), kept ? "" : "since this page was opened; history_enabled: true keeps three days");
  if (!kept) showCurves(seen, "10m");
  else if (turn % CURVES_EVERY[span] === 0) showCurves(await get(`history?span=${span}`), span);
}

async function loop() {
  try {
    await round();
    byId("login").hidden = true;
  } catch (error) {
    if (error instanceof NeedsToken) byId("login").hidden = false;
    showLost(error);
  }
  // Not while nobody looks: each question costs the engine a little.
  if (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
  setTimeout(loop, STATS_MS);
}

function setUpTheme() {
  const button = byId("theme");
  const apply = (theme) => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    setText(button, `Theme: ${theme}`);
    localStorage.setItem("dflash2-theme", theme);
  };
  apply(THEMES.includes(localStorage.getItem("dflash2-theme")) ? localStorage.getItem("dflash2-theme") : "system");
  button.addEventListener("click", () =>
    apply(THEMES[(THEMES.indexOf(localStorage.getItem("dflash2-theme")) + 1) % THEMES.length]));
}

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  setToken(byId("token").value);
  byId("login").hidden = true;
});
byId("span").addEventListener("change", async () => {
  const span = byId("span").value;
  byId("csv").href = `history.csv?span=${span}`;
  showCurves(await get(`history?span=${span}`), span);
});
byId("csv").addEventListener("click", (event) => {
  event.preventDefault();  // through fetch, which can carry the token
  download(byId("csv").getAttribute("href"), `dflash2-${byId("span").value}.csv`);
});
setUpTheme();
loop();
