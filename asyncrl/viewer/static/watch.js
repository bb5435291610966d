"use strict";
// The page of `asyncrl watch`. Foreign text (prompts, completions, names, logs) is only ever set as
// textContent, so that markup in it stays text.

const PAGES = ["overview", "staleness", "learner", "processes", "ledger", "samples", "config", "logs"];
const COLORS = ["#2563eb", "#d97706", "#059669", "#be185d", "#7c3aed", "#0891b2", "#4d7c0f", "#78350f"];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
const REFRESH_MS = 2000;
const state = {
  page: "overview", runs: [], hidden: new Set(), axis: "step", smooth: 0, paused: false, seen: "",
  filter: { sort: "batch", text: "", reward: "", lag: "", step: "", rule: "" }, shade: "lag",
  run: "", file: "",
};

// ---- small helpers ------------------------------------------------------------------------------

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child != null).map((child) =>
    child instanceof Node ? child : document.createTextNode(String(child))));
  return node;
}

const number = (x, digits = 3) => x == null ? "-" : Math.abs(x) >= 10000 || x === 0 ? Math.round(x).toLocaleString("en") :
  Math.abs(x) < 0.001 ? x.toExponential(1) : String(Number(x.toPrecision(digits)));
const percent = (x) => x == null ? "-" : `${(100 * x).toFixed(x < 0.1 ? 1 : 0)}%`;
const duration = (s) => s < 90 ? `${s.toFixed(0)} s` : s < 5400 ? `${(s / 60).toFixed(0)} min` : `${(s / 3600).toFixed(1)} h`;
const main = () => document.getElementById("main");
const shown = () => state.runs.filter((run) => !state.hidden.has(run.id));
const color = (id) => COLORS[Math.max(state.runs.findIndex((run) => run.id === id), 0) % COLORS.length];

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

function table(head, rows) {
  return element("div", { class: "wide" }, element("table", {},
    element("thead", {}, element("tr", {}, ...head.map((cell) => element("th", { scope: "col" }, cell)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((cell) =>
      element("td", { class: typeof cell === "string" ? "text" : "" }, cell)))))));
}

// ---- plots --------------------------------------------------------------------------------------

function layout(title, unit, x) {
  const style = getComputedStyle(document.documentElement);
  const text = style.getPropertyValue("--text").trim(), edge = style.getPropertyValue("--edge").trim();
  const axis = { gridcolor: edge, zerolinecolor: edge, linecolor: edge };
  return {
    title: { text: `<b>${title}</b>`, font: { size: 14 }, x: 0.02, xanchor: "left", y: 0.97, yanchor: "top" },
    margin: { l: 60, r: 15, t: 80, b: 45 }, font: { color: text }, paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)", xaxis: { ...axis, title: { text: x } }, yaxis: { ...axis, title: { text: unit }, rangemode: "tozero" },
    legend: { orientation: "h", y: 1.01, yanchor: "bottom", x: 0, xanchor: "left", font: { size: 11 } }, hovermode: "x unified", showlegend: true,
    uirevision: title + state.axis,
  };
}
const OPTIONS = { displaylogo: false, responsive: true, displayModeBar: false };
const escape = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function traces(figure) {
  const several = new Set(figure.lines.map((line) => line.run)).size > 1;
  const labels = [...new Set(figure.lines.map((line) => line.label))];
  return figure.lines.flatMap((line) => {
    const index = labels.indexOf(line.label);
    const ink = several ? color(line.run) : COLORS[index % COLORS.length];
    const name = escape(several ? `${line.run}: ${line.label}` : line.label);
    const mark = line.x.length > 1 && !line.band ? "lines" : "lines+markers";
    const drawn = [{ x: line.x, y: line.y, name, mode: mark, line: { color: ink, width: 1.6, dash: several ? DASHES[index % DASHES.length] : "solid" }, marker: { size: 5, color: ink } }];
    if (line.band) {
      const low = line.y.map((y, i) => y - line.band[i]), high = line.y.map((y, i) => y + line.band[i]);
      drawn.push({ mode: "lines", x: [...line.x, ...line.x.slice().reverse()], y: [...high, ...low.reverse()], fill: "toself",
        fillcolor: ink + "22", line: { width: 0 }, hoverinfo: "skip", showlegend: false });
    }
    return drawn;
  });
}

function plotBox(parent, key, meanings = {}) {
  let box = [...parent.children].find((child) => child.dataset.key === key);
  if (!box) {
    const details = element("details", {}, element("summary", {}, "what is drawn"),
      ...Object.entries(meanings).map(([name, text]) => element("div", {}, element("code", {}, name), ` ${text}`)));
    box = element("div", { class: "plot" }, element("div", { class: "draw" }), Object.keys(meanings).length ? details : null);
    box.dataset.key = key;
    parent.append(box);
  }
  return box.firstChild;
}

const X_NAME = { step: "step", time: "seconds", tokens: "trained tokens" };

async function drawPlots(place) {
  const runs = shown().map((run) => run.id).join("|");
  const figures = runs ? await ask("plots", { page: state.page, runs, axis: state.axis, smooth: state.smooth }) : [];
  const grid = place.querySelector(".grid") ?? place.appendChild(element("div", { class: "grid" }));
  const titles = new Set(figures.map((figure) => figure.title));
  for (const box of [...grid.children]) if (!box.dataset.extra && !titles.has(box.dataset.key)) box.remove();
  for (const figure of figures)
    await Plotly.react(plotBox(grid, figure.title, figure.metrics), traces(figure), layout(figure.title, figure.unit, X_NAME[state.axis]), OPTIONS);
  if (!figures.length) place.querySelector(".empty") ?? place.append(element("p", { class: "empty soft" }, "nothing measured yet"));
  else place.querySelector(".empty")?.remove();
}

// ---- pages --------------------------------------------------------------------------------------

async function overview(place) {
  const runs = shown().map((run) => run.id).join("|");
  const seen = runs ? await ask("overview", { runs }) : {};
  if (!state.runs.length) return place.replaceChildren(element("p", { class: "soft" }, "The run has not begun yet. This page shows it from then on."));
  const top = place.querySelector(".top") ?? place.appendChild(element("div", { class: "top" }));
  top.replaceChildren(...Object.entries(seen).map(([id, run]) => {
    const s = run.state, speed = run.speed ?? {}, idle = speed.idle_share ?? {};
    const cards = [
      ["step", `${s.step} / ${s.steps}`], ["state", s.state], ["held-out accuracy", number(s.accuracy)], ["batch reward", number(s.reward)],
      ["mean lag", number(s.lag)], ["lag limit", number(run.lag.limit)], ["idle: generators / learner", `${percent(idle.generator)} / ${percent(idle.learner)}`],
      ["generated", `${number(speed.generator_tokens_per_s)} tok/s`], ["time", duration(s.seconds)],
    ];
    return element("section", {},
      element("h2", {}, element("span", { class: "dot", style: `display:inline-block;background:${color(id)}` }), " ", id),
      s.problem ? element("p", { class: "bad" }, s.problem) : null,
      element("div", { class: "cards" }, ...cards.map(([label, value]) => element("div", { class: "card" }, label, element("b", {}, value)))),
      element("ul", { class: "advice" }, ...run.advice.map((line) =>
        element("li", {}, line.said, line.try_this ? element("span", { class: "soft" }, `. To try: ${line.try_this}`) : "")),
        ...run.waits.map((text) => element("li", {}, text))),
      run.health.length ? element("ul", { class: "health" }, ...run.health.map((sign) =>
        element("li", {}, element("b", {}, sign.said), `; ${sign.try_this}`))) : null);
  }));
  await drawPlots(place);
}

async function staleness(place) {
  await drawPlots(place);
  const runs = shown().map((run) => run.id).join("|");
  const lags = runs ? await ask("lags", { runs }) : {};
  const grid = place.querySelector(".grid");
  for (const [id, seen] of Object.entries(lags)) {
    if (!seen.x.length) continue;
    const draw = plotBox(grid, `lags ${id}`);
    draw.parentNode.dataset.extra = "1";
    const data = seen.lags.map((lag, i) => ({ x: seen.x, y: seen.share[i], name: `lag ${lag}`, stackgroup: "lag", mode: "lines",
      line: { width: 0.5, color: shadeColor(i / Math.max(seen.lags.length - 1, 1)) } }));
    await Plotly.react(draw, data, layout(`Lag of trained tokens: ${escape(id)}`, "share of tokens", "batch"), OPTIONS);
  }
}
const shadeColor = (share) => `hsl(${220 - 200 * share}, 75%, ${55 - 10 * share}%)`;

async function processes(place) {
  const seen = await ask("processes", { runs: shown().map((run) => run.id).join("|") });
  place.replaceChildren(...Object.entries(seen).flatMap(([id, rows]) => [element("h2", {}, id),
    table(["process", "state", "host", "pid", "memory", "restarts", "last line of its log"], rows.map((row) => [
      row.name, row.said, row.host || "-", row.pid ?? "-", row.memory_mb == null ? "-" : `${number(row.memory_mb)} MiB`, row.restarts, row.last_line || "-"]))]));
}

async function ledger(place) {
  const seen = await ask("ledger", { runs: shown().map((run) => run.id).join("|") });
  place.replaceChildren();
  for (const [id, run] of Object.entries(seen)) {
    const total = run.totals.generated || 1;
    const rows = Object.entries(run.lines).filter(([, line]) => line.tokens > 0);
    place.append(element("h2", {}, `${id}: ${number(run.totals.generated)} tokens generated`),
      element("div", { class: "plot" }, element("div", { class: "draw", style: "height:160px" })),
      table(["where they ended", "tokens", "share", "samples", "mean length", "mean reward"], rows.map(([name, line]) => [
        name, number(line.tokens), percent(line.tokens / total), number(line.samples), number(line.mean_length), number(line.mean_reward)])),
      Object.keys(run.failures ?? {}).length ? table(["failure", "samples"], Object.entries(run.failures)) : "");
    const bars = rows.map(([name, line], i) => ({ y: [""], x: [line.tokens / total], name, type: "bar", orientation: "h", marker: { color: COLORS[i % COLORS.length] } }));
    await Plotly.react(place.querySelectorAll(".draw")[Object.keys(seen).indexOf(id)], bars,
      { ...layout("Every generated token", "", "share"), barmode: "stack", margin: { l: 20, r: 15, t: 40, b: 30 } }, OPTIONS);
  }
}

async function config(place) {
  const seen = await ask("config", { runs: shown().map((run) => run.id).join("|") });
  const value = (x) => x == null ? "-" : JSON.stringify(x);
  place.replaceChildren();
  if (seen.differences.length) {
    const names = Object.keys(seen.runs);
    place.append(element("h2", {}, "Where the runs differ"), table(["key", ...names], seen.differences.map((row) => [row.key, ...names.map((name) => value(row.values[name]))])));
  }
  for (const [id, settings] of Object.entries(seen.runs))
    place.append(element("h2", {}, id), element("pre", {}, Object.entries(settings).map(([key, x]) => `${key} = ${value(x)}`).join("\n")));
}

function runPicker(change) {
  if (!shown().some((run) => run.id === state.run)) state.run = (shown().find((run) => run.samples) ?? shown()[0])?.id ?? "";
  return element("label", {}, "run ", element("select", { onchange: (event) => { state.run = event.target.value; change(); } },
    ...shown().map((run) => element("option", { value: run.id, selected: run.id === state.run }, run.id))));
}

async function logs(place) {
  const picker = runPicker(() => { state.file = ""; render(true); });
  if (!state.run) return place.replaceChildren(element("p", { class: "soft" }, "no run is shown"));
  const seen = await ask("logs", { run: state.run, file: state.file });
  const files = element("select", { onchange: (event) => { state.file = event.target.value; render(true); } },
    ...seen.files.map((name) => element("option", { selected: name === seen.file }, name)));
  place.replaceChildren(element("div", { class: "filters" }, picker, element("label", {}, "file ", files)), element("pre", { id: "log" }, seen.text || "no log yet"));
}

// ---- samples ------------------------------------------------------------------------------------

const RULES = ["", "group", "best", "worst", "off_policy", "longest", "random"];
const ORDERS = ["batch", "reward", "lag", "length", "kl", "weight"];

async function samples(place) {
  const picker = runPicker(() => render(true));
  if (!state.run) return place.replaceChildren(element("p", { class: "soft" }, "no run is shown"));
  const field = (name, hint) => element("label", {}, `${name} `, element("input", { value: state.filter[name], placeholder: hint, size: 8,
    onchange: (event) => { state.filter[name] = event.target.value.trim(); render(true); } }));
  const choice = (name, values) => element("label", {}, `${name} `, element("select", { onchange: (event) => { state.filter[name] = event.target.value; render(true); } },
    ...values.map((value) => element("option", { value, selected: state.filter[name] === value }, value || "any"))));
  const seen = await ask("samples", { run: state.run, ...state.filter });
  const shade = element("label", {}, "color ", element("select", { id: "shade", onchange: (event) => { state.shade = event.target.value; render(true); } },
    ...Object.keys(seen.shades).map((name) => element("option", { value: name, selected: name === state.shade }, name))));
  const full = await Promise.all(seen.rows.slice(0, 24).map((row) => ask("sample", { run: state.run, number: row.number })));
  const groups = new Map();
  for (const row of full) groups.set(`${row.batch}/${row.ticket}`, [...(groups.get(`${row.batch}/${row.ticket}`) ?? []), row]);
  place.replaceChildren(
    element("div", { class: "filters" }, picker, field("step", "10.."), field("reward", "0..0.5"), field("lag", "3.."), field("text", "regular expression"), choice("rule", RULES), choice("sort", ORDERS), shade),
    element("p", { class: "soft" }, seen.all ? `${seen.rows.length} of ${seen.all} logged samples. Color: ${seen.shades[state.shade] ?? ""}` : "This run has logged no samples yet: it logs some of every record.samples_every-th batch (record.token_samples)."),
    ...[...groups.values()].map((rows) => element("section", {},
      rows.length > 1 ? element("h3", {}, `batch ${rows[0].batch}, ticket ${rows[0].ticket}: rewards of the group ${rows[0].group_rewards.map((r) => number(r)).join(", ")}`) : null,
      element("div", { class: "pair" }, ...rows.map((row) => sampleBox(row))))));
}

function sampleBox(row) {
  const facts = [["batch", row.batch], ["ticket", row.ticket], ["sample", row.sample], ["reward", number(row.reward)], ...Object.entries(row.parts).map(([k, v]) => [k, number(v)]),
    ["lag", `${number(row.lag_mean)} (max ${row.lag_max})`], ["tokens", row.length], ["end", row.finish], ["kl", number(row.kl)], ["chosen by", row.rules.join(", ")]];
  if (row.calls) facts.push(["calls", row.calls], ["excluded tokens", row.excluded]);
  return element("article", { class: "sample" },
    element("div", { class: "head" }, ...facts.map(([name, value]) => element("span", {}, `${name} `, element("b", {}, value)))),
    ...row.sequences.map((sequence) => conversation(sequence)),
    row.group_key ? element("button", { type: "button", onclick: () => { state.filter = { sort: "batch", text: "", reward: "", lag: "", step: "", rule: "", group_key: row.group_key }; render(true); } }, "this prompt at other steps") : null);
}

function conversation(sequence) {
  const values = sequence.shades[state.shade];
  const paint = painter(values ?? []);
  const turns = [element("div", { class: "turn" }, element("div", { class: "who" }, "prompt"), sequence.prompt)];
  let turn = null, kind = null;
  sequence.pieces.forEach((piece, i) => {
    const now = sequence.mask[i] ? "model" : "environment";
    if (now !== kind) {
      turn = element("div", { class: `turn ${now}` }, element("div", { class: "who" }, now === "model" ? "response" : "not sampled by the model: excluded"));
      turns.push(turn);
      kind = now;
    }
    const facts = Object.entries(sequence.shades).map(([name, of]) => `${name} ${typeof of[i] === "number" ? number(of[i]) : of[i] ?? "not measured"}`);
    turn.append(element("span", { class: `token ${sequence.used[i] || !sequence.mask[i] ? "" : "unused"}`, style: paint(values?.[i]), title: `${JSON.stringify(piece)}\n${facts.join("\n")}` }, piece));
  });
  return element("div", {}, ...turns, values ? null : element("p", { class: "soft" }, `${state.shade} was not measured for this batch (record.split_every)`));
}

function painter(values) {
  const numbers = values.filter((x) => typeof x === "number"), names = [...new Set(values.filter((x) => typeof x === "string"))];
  const largest = Math.max(...numbers.map(Math.abs), 0) || 1;
  return (value) => value == null ? "" : typeof value === "string" ? `background:${COLORS[names.indexOf(value) % COLORS.length]}44` :
    `background:rgba(${value > 0 ? "239,68,68" : "59,130,246"},${(0.75 * Math.min(Math.abs(value) / largest, 1)).toFixed(3)})`;
}

// ---- frame --------------------------------------------------------------------------------------

const DRAW = { overview, staleness, learner: drawPlots, processes, ledger, samples, config, logs };
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
    element("span", { class: "dot", style: `background:${state.hidden.has(run.id) ? "transparent" : color(run.id)};border:1px solid ${color(run.id)}` }), run.id, element("span", { class: "soft" }, `${run.step}/${run.steps} ${run.state}`))));
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
  const status = document.getElementById("status");
  try {
    state.runs = await ask("runs");
    report(null);
    const now = state.runs.map((run) => `${run.id} ${run.rows} ${run.samples} ${run.state} ${run.summed_up}`).join("\n");
    const news = now !== state.seen;
    const live = ["processes", "logs", "ledger"].includes(state.page) && state.runs.some((run) => run.state === "running");
    if (news) frame();
    status.textContent = state.paused ? "paused" : state.runs.some((run) => run.state === "running") ? "live" : "not running";
    const reading = state.page === "samples" && state.seen !== "";  // a reader's place is kept
    if (news && !reading || live) await render();
    state.seen = now;
  } catch (error) {
    status.textContent = "no answer from asyncrl watch";
    report(new Error(`asyncrl watch does not answer (${error.message}). Start it again; this page goes on by itself.`));
  }
  setTimeout(async function wait() { if (state.paused || document.hidden) setTimeout(wait, 500); else await tick(); }, REFRESH_MS);
}

function theme(dark) {
  document.documentElement.classList.toggle("dark", dark);
  localStorage.setItem("asyncrl-dark", dark ? "1" : "0");
  if (state.seen) render(true);
}

document.addEventListener("keydown", (event) => {
  if (["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName) || event.ctrlKey || event.metaKey) return;
  const page = PAGES[Number(event.key) - 1];
  if (page) open(page);
  if (event.key === "d") theme(!document.documentElement.classList.contains("dark"));
  if (event.key === "p") state.paused = !state.paused;
});
document.getElementById("theme").addEventListener("click", () => theme(!document.documentElement.classList.contains("dark")));
document.getElementById("axis").addEventListener("change", (event) => { state.axis = event.target.value; render(true); });
document.getElementById("smooth").addEventListener("change", (event) => { state.smooth = Number(event.target.value); render(); });
const kept = localStorage.getItem("asyncrl-dark");
theme(kept === null ? matchMedia("(prefers-color-scheme: dark)").matches : kept === "1");
if (PAGES.includes(location.hash.slice(1))) state.page = location.hash.slice(1);
frame();
tick();
