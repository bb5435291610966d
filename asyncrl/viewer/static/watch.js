"use strict";
// The page of `asyncrl watch`. Foreign text (prompts, completions, names, logs) is set as textContent,
// or comes escaped in the blocks of a report, so that markup in it stays text.

const PAGES = ["overview", "staleness", "learner", "processes", "ledger", "samples", "config", "logs"];
// Slow updates are made less often: they cost at most 1 / SPARE of a core.
const REFRESH_MS = 2000, SPARE = 250, SLOWEST_MS = 15000;
const state = {
  page: "overview", runs: [], hidden: new Set(), axis: "step", smooth: 0, paused: false, drawn: null,
  filter: { sort: "batch", text: "", reward: "", lag: "", step: "", rule: "" }, shade: "lag",
  run: "", file: "",
};

// ---- small helpers ------------------------------------------------------------------------------

const duration = (s) => s < 90 ? `${s.toFixed(0)} s` : s < 5400 ? `${(s / 60).toFixed(0)} min` : `${(s / 3600).toFixed(1)} h`;
const main = () => document.getElementById("main");
const shown = () => state.runs.filter((run) => !state.hidden.has(run.id));
const rank = (id) => Math.max(state.runs.findIndex((run) => run.id === id), 0);
const color = (id) => COLORS[rank(id) % COLORS.length];

async function ask(name, query = {}) {
  const words = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value != null));
  const reply = await fetch(`/api/${name}?${words}`);
  const content = reply.headers.get("content-type")?.includes("json") ? await reply.json() : { error: await reply.text() };
  if (!reply.ok) throw new Error(content.error);
  return content;
}

function report(error) {
  const place = document.getElementById("error");
  place.hidden = !error;
  place.textContent = error ? error.message : "";
}

const isText = (cell) => typeof cell === "string" && !/^[-+\d.,e]+ ?(%|MiB)?$/.test(cell);

function table(head, rows) {
  const kinds = head.map((_, i) => rows.some((row) => isText(row[i])) ? "text" : "");
  return element("div", { class: "wide" }, element("table", {},
    element("thead", {}, element("tr", {}, ...head.map((cell, i) => element("th", { scope: "col", class: kinds[i] }, cell)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((cell, i) => element("td", { class: kinds[i] }, cell)))))));
}

// ---- plots --------------------------------------------------------------------------------------

// Lines of several runs have the color of their run and one dash pattern a metric.
function overlaid(plot) {
  if (new Set(plot.lines.map((line) => line.run)).size < 2) return plot;
  const metrics = [...new Set(plot.lines.map((line) => line.metric))];
  return { ...plot, lines: plot.lines.map((line) => ({ ...line, label: `${line.run}: ${line.label}`, color: rank(line.run), dash: metrics.indexOf(line.metric) })) };
}

// Reuse the figure of a name, so that updates keep zoom and hidden lines.
function figure(parent, key) {
  const node = [...parent.children].find((child) => child.dataset.key === key) ?? parent.appendChild(element("figure", { class: "plot" }));
  node.dataset.key = key;
  return node;
}

async function drawPlots(place) {
  const runs = shown().map((run) => run.id).join("|");
  const plots = runs ? await ask("plots", { page: state.page, runs, axis: state.axis, smooth: state.smooth }) : [];
  const grid = place.querySelector(".grid") ?? place.appendChild(element("div", { class: "grid" }));
  const keys = plots.map((plot) => `${plot.title} ${plot.across}`);
  for (const old of [...grid.children]) if (!keys.includes(old.dataset.key)) old.remove();
  plots.forEach((plot, i) => drawPlot(figure(grid, keys[i]), overlaid(plot)));
  if (!plots.length && state.page !== "ledger") place.querySelector(".empty") ?? place.append(element("p", { class: "empty soft" }, "No measurements yet."));
  else place.querySelector(".empty")?.remove();
}

// ---- pages --------------------------------------------------------------------------------------

// The blocks of each run as they are in its report, below its name and state.
async function blocks(name) {
  const runs = shown();
  const content = runs.length ? await ask(name, { runs: runs.map((run) => run.id).join("|") }) : {};
  return runs.map((run) => {
    const step = run.steps ? `step ${run.step} of ${run.steps}` : `version ${run.step}`;
    const progress = [run.state, step, ...run.state === "running" ? [duration(run.seconds)] : []].join(", ");
    const section = element("section", {},
      element("h2", {}, element("span", { class: "dot", style: `display:inline-block;background:${color(run.id)}` }), " ", run.id,
        element("span", { class: "soft" }, ` ${progress}`)),
      run.problem ? element("p", { class: "bad" }, run.problem) : null);
    section.insertAdjacentHTML("beforeend", content[run.id]);
    for (const node of section.querySelectorAll("[id]")) {  // several runs have the same ids
      if (node.id === "advice") node.className = "advice";
      node.removeAttribute("id");
    }
    return section;
  });
}

async function overview(place) {
  if (!state.runs.length) return place.replaceChildren(element("p", { class: "soft waiting" }, "No run has begun here yet. The page shows a run, or a model of a Tinker server, once it begins."));
  const sections = await blocks("overview");
  place.querySelector(".waiting")?.remove();
  const top = place.querySelector(".top") ?? place.appendChild(element("div", { class: "top" }));
  top.replaceChildren(...sections);
  await drawPlots(place);
}

async function processes(place) {
  const content = await ask("processes", { runs: shown().map((run) => run.id).join("|") });
  place.replaceChildren(...Object.entries(content).flatMap(([id, rows]) => [element("h2", {}, id),
    table(["process", "state", "host", "pid", "memory", "restarts", "last line of its log"], rows.map((row) => [
      row.name, row.said, row.host || "-", row.pid ?? "-", row.memory_mb == null ? "-" : `${number(row.memory_mb)} MiB`, row.restarts, row.last_line || "-"]))]));
}

async function ledger(place) {
  const sections = await blocks("ledger");
  const plots = place.querySelector(".plots") ?? element("div", { class: "plots" });
  place.replaceChildren(plots, ...sections);
  await drawPlots(plots);
}

async function config(place) {
  const content = await ask("config", { runs: shown().map((run) => run.id).join("|") });
  const value = (x) => x == null ? "-" : JSON.stringify(x);
  place.replaceChildren();
  if (content.differences.length) {
    const names = Object.keys(content.runs);
    place.append(element("h2", {}, "Settings that differ"), table(["key", ...names], content.differences.map((row) => [row.key, ...names.map((name) => value(row.values[name]))])));
  }
  for (const [id, settings] of Object.entries(content.runs))
    place.append(element("h2", {}, id), content.changed[id].length ? element("p", { class: "soft" }, "Bold: differs from the default.") : "",
      element("pre", {}, ...Object.entries(settings).map(([key, x]) => element(content.changed[id].includes(key) ? "strong" : "span", {}, `${key} = ${value(x)}\n`))));
}

function runPicker(change) {
  if (!shown().some((run) => run.id === state.run)) {
    state.run = (shown().find((run) => run.samples) ?? shown()[0])?.id ?? "";
    state.file = "";
  }
  return element("label", {}, "run ", element("select", { onchange: (event) => { state.run = event.target.value; change(); } },
    ...shown().map((run) => element("option", { value: run.id, selected: run.id === state.run }, run.id))));
}

async function logs(place) {
  const picker = runPicker(() => { state.file = ""; render(true); });
  if (!state.run) return place.replaceChildren(element("p", { class: "soft" }, "Select a run above."));
  const content = await ask("logs", { run: state.run, file: state.file });
  const text = content.text || "Nothing is logged here yet.";
  const key = [state.run, content.file, ...content.files, picker.textContent].join("\n");
  const shownLog = place.querySelector("#log");
  if (shownLog?.dataset.key === key) {  // an update keeps an open list, and the reader's position above the end
    const atEnd = shownLog.scrollHeight - shownLog.scrollTop - shownLog.clientHeight < 40;
    shownLog.textContent = text;
    if (atEnd) shownLog.scrollTop = shownLog.scrollHeight;
    return;
  }
  const files = element("select", { onchange: (event) => { state.file = event.target.value; render(true); } },
    ...content.files.map((name) => element("option", { selected: name === content.file }, name)));
  const log = element("pre", { id: "log" }, text);
  log.dataset.key = key;
  place.replaceChildren(element("div", { class: "filters" }, picker, element("label", {}, "file ", files)), log);
  log.scrollTop = log.scrollHeight;
}

// ---- samples ------------------------------------------------------------------------------------

const RULES = ["", "group", "best", "worst", "off_policy", "longest", "random"];
const ORDERS = ["batch", "reward", "lag", "length", "kl", "weight"];

async function samples(place) {
  const picker = runPicker(() => render(true));
  if (!state.run) return place.replaceChildren(element("p", { class: "soft" }, "Select a run above."));
  const field = (name, hint) => element("label", {}, `${name} `, element("input", { value: state.filter[name], placeholder: hint, size: 8,
    onchange: (event) => { state.filter[name] = event.target.value.trim(); render(true); } }));
  const choice = (name, values) => element("label", {}, `${name} `, element("select", { onchange: (event) => { state.filter[name] = event.target.value; render(true); } },
    ...values.map((value) => element("option", { value, selected: state.filter[name] === value }, value || "any"))));
  const content = await ask("samples", { run: state.run, ...state.filter });
  const shade = element("label", {}, "color ", element("select", { id: "shade", onchange: (event) => { state.shade = event.target.value; render(true); } },
    ...Object.keys(content.shades).map((name) => element("option", { value: name, selected: name === state.shade }, name))));
  const full = await Promise.all(content.rows.slice(0, 24).map((row) => ask("sample", { run: state.run, number: row.number })));
  const groups = new Map();
  for (const row of full) groups.set(`${row.batch}/${row.ticket}`, [...(groups.get(`${row.batch}/${row.ticket}`) ?? []), row]);
  place.replaceChildren(
    element("div", { class: "filters" }, picker, field("step", "10.."), field("reward", "0..0.5"), field("lag", "3.."), field("text", "regular expression"), choice("rule", RULES), choice("sort", ORDERS), shade),
    element("p", { class: "soft" }, content.all ? `${content.rows.length} of ${content.all} logged samples. Color: ${content.shades[state.shade] ?? ""}` : content.none),
    ...[...groups.values()].map((rows) => element("section", {},
      rows.length > 1 ? element("h3", {}, `batch ${rows[0].batch}, ticket ${rows[0].ticket}: rewards of the group ${rows[0].group_rewards.map((r) => number(r)).join(", ")}`) : null,
      element("div", { class: "pair" }, ...rows.map((row) => sampleBox(row, state.shade, otherSteps(row)))))));
}

function otherSteps(row) {
  return row.group_key ? element("button", { type: "button", onclick: () => { state.filter = { sort: "batch", text: "", reward: "", lag: "", step: "", rule: "", group_key: row.group_key }; render(true); } }, "this prompt at other steps") : null;
}

// ---- frame --------------------------------------------------------------------------------------

const DRAW = { overview, staleness: drawPlots, learner: drawPlots, processes, ledger, samples, config, logs };
let drawing = Promise.resolve();

function render(fresh = false) {
  drawing = drawing.then(async () => {
    const place = main();
    if (fresh && ["overview", "staleness", "learner"].includes(state.page)) place.replaceChildren();
    try { await DRAW[state.page](place); report(null); } catch (error) { report(error); }
  });
  return drawing;
}

function frame() {
  document.getElementById("pages").replaceChildren(...PAGES.map((name) => element("button", { type: "button", "aria-current": name === state.page ? "page" : false, onclick: () => open(name) }, name)));
  document.getElementById("runs").replaceChildren(...state.runs.map((run) => element("button", { type: "button", "aria-pressed": String(!state.hidden.has(run.id)), title: run.path,
    onclick: () => { state.hidden.has(run.id) ? state.hidden.delete(run.id) : state.hidden.add(run.id); frame(); render(true); } },
    element("span", { class: "dot", style: `background:${state.hidden.has(run.id) ? "transparent" : color(run.id)};border:1px solid ${color(run.id)}` }), run.id, element("span", { class: "soft" }, `${run.steps ? `${run.step}/${run.steps}` : `version ${run.step}`} ${run.state}`))));
  document.getElementById("controls").hidden = !["overview", "staleness", "learner"].includes(state.page);
}

function open(name) {
  state.page = name;
  location.hash = name;
  main().replaceChildren();
  frame();
  render(true);
}

async function tick() {
  const began = performance.now();
  const status = document.getElementById("status");
  try {
    state.runs = await ask("runs");
    report(null);
    const newest = state.runs.map((run) => `${run.id} ${run.rows} ${run.samples} ${run.state} ${run.summed_up}`).join("\n");
    const news = newest !== state.drawn;
    const live = ["processes", "logs", "ledger"].includes(state.page) && state.runs.some((run) => run.state === "running");
    if (news) frame();
    status.textContent = state.paused ? "paused" : state.runs.some((run) => run.state === "running") ? "live" : "not running";
    const reading = state.page === "samples" && Boolean(state.drawn);  // keep the reader's position
    if (news && !reading || live) await render();
    state.drawn = newest;
  } catch (error) {
    status.textContent = "no answer from asyncrl watch";
    report(new Error(`asyncrl watch does not answer (${error.message}). Start it again: this page then continues.`));
  }
  setTimeout(async function wait() { if (state.paused || document.hidden) setTimeout(wait, 500); else await tick(); },
    Math.min(Math.max(REFRESH_MS, SPARE * (performance.now() - began)), SLOWEST_MS));
}

// the theme of the system, until the reader chooses one
const systemTheme = matchMedia("(prefers-color-scheme: dark)");
function theme() {
  const chosen = localStorage.getItem("asyncrl-dark");
  document.documentElement.classList.toggle("dark", chosen === null ? systemTheme.matches : chosen === "1");
}

function toggleTheme() {
  localStorage.setItem("asyncrl-dark", document.documentElement.classList.contains("dark") ? "0" : "1");
  theme();
}

document.addEventListener("keydown", (event) => {
  if (["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName) || event.ctrlKey || event.metaKey) return;
  const page = PAGES[Number(event.key) - 1];
  if (page) open(page);
  if (event.key === "d") toggleTheme();
  if (event.key === "p") state.paused = !state.paused;
});
document.getElementById("theme").addEventListener("click", toggleTheme);
document.getElementById("axis").addEventListener("change", (event) => { state.axis = event.target.value; render(true); });
document.getElementById("smooth").addEventListener("change", (event) => { state.smooth = Number(event.target.value); render(); });
systemTheme.addEventListener("change", theme);
theme();
if (PAGES.includes(location.hash.slice(1))) state.page = location.hash.slice(1);
frame();
tick();
