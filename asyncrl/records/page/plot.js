"use strict";
// Draws the plots of every page as SVG: lines with bands, points, bars, stacked areas, and spans on
// lanes (PagePlot in page_kit.py). Drag to zoom and double-click to reset, hover for the values,
// click on a name to hide its line. Foreign text is only ever set as text.

const COLORS = ["#2563eb", "#d97706", "#059669", "#be185d", "#7c3aed", "#0891b2", "#4d7c0f", "#b45309", "#dc2626", "#64748b"];
const DASHES = ["none", "7 4", "2 3", "8 3 2 3", "14 4"];
const ROOM = { left: 64, right: 14, above: 10, below: 38 };
const HEIGHT = 250, LANE = 30;

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child != null).map((child) => child instanceof Node ? child : String(child)));
  return node;
}
const element = (tag, attributes = {}, ...children) => build(document.createElement(tag), attributes, children);
const shape = (tag, attributes = {}, ...children) => build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const number = (x, digits = 3) => x == null ? "-" : Math.abs(x) >= 10000 || x === 0 ? Math.round(x).toLocaleString("en") :
  Math.abs(x) < 0.001 ? x.toExponential(1) : String(Number(x.toPrecision(digits)));
const colorOf = (line, index) => COLORS[(line.color ?? index) % COLORS.length];
const dashOf = (line, index) => DASHES[(line.dash ?? Math.floor(index / COLORS.length)) % DASHES.length];

// ---- axes ---------------------------------------------------------------------------------------

// At most `most` round numbers from low to high: multiples of 1, 2, 2.5 or 5 times a power of ten.
function ticks(low, high, most) {
  const power = 10 ** Math.floor(Math.log10((high - low) / most));
  const step = [1, 2, 2.5, 5, 10, 20].map((factor) => factor * power).find((width) => Math.floor(high / width) - Math.ceil(low / width) < most);
  const first = Math.ceil(low / step - 1e-9), count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: Math.max(count, 0) }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

// Powers of ten, and 2 and 5 times them where there would be few.
function logTicks(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const factors = last - first > 3 ? [1] : [1, 2, 5], thin = Math.ceil((last - first) / 8);
  const found = [];
  for (let power = first; power <= last; power += thin) found.push(...factors.map((factor) => Number(`${factor}e${power}`)));
  return found.filter((x) => x >= low * 0.999 && x <= high * 1.001);
}

// A scale from values [low, high] to pixels [from, to].
function makeScale(low, high, from, to, { log = false, names = [] } = {}) {
  const place = log ? Math.log : (x) => x;
  const start = place(low), width = place(high) - start || 1;
  const marks = names.length ? names.map((_, i) => i).filter((i) => i >= low && i <= high) : log ? logTicks(low, high) : ticks(low, high, Math.max(2, Math.floor(Math.abs(to - from) / (from < to ? 75 : 38))));
  return {
    low, high, marks, at: (x) => from + (place(x) - start) / width * (to - from),
    back: (pixel) => { const x = start + (pixel - from) / (to - from) * width; return log ? Math.exp(x) : x; },
    label: (x) => names.length ? names[x] : String(Math.abs(x) >= 1e6 || (x !== 0 && Math.abs(x) < 1e-4) ? x.toExponential().replace("e+", "e") : x),
  };
}

function extent(values, log) {
  let low = Infinity, high = -Infinity;
  for (const x of values) if (x != null && (!log || x > 0)) { if (x < low) low = x; if (x > high) high = x; }
  return low <= high ? [low, high] : log ? [1, 10] : [0, 1];
}

function xScale(spec, lines, zoom, size) {
  const log = (spec.log ?? "").includes("x"), names = spec.x_names ?? [];
  let [low, high] = zoom ?? extent(lines.flatMap((line) => [...line.x, ...(line.until ?? [])]), log);
  if (!zoom && (spec.kind === "bars" || names.length)) [low, high] = [low - 0.6, high + 0.6];
  if (!zoom && spec.kind === "points" && log) [low, high] = [low / 1.2, high * 1.2];
  if (!zoom && spec.kind === "points" && !log) { const edge = 0.06 * (high - low) || 0.5; [low, high] = [low - edge, high + 2 * edge]; }
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
  return makeScale(low, high, size.left, size.width - size.right, { log, names });
}

function yScale(spec, lines, across, size) {
  const log = (spec.log ?? "").includes("y"), names = spec.y_names ?? [], bottom = size.height - size.below;
  if (names.length) return makeScale(-0.5, names.length - 0.5, size.above, bottom, { names });
  const inside = (line) => (_, i) => line.x[i] >= across.low && line.x[i] <= across.high;
  const values = lines.flatMap((line) => [line.y, line.low ?? [], line.high ?? []].flatMap((part) => part.filter(inside(line))));
  let [low, high] = extent(values, log);
  if (!log) [low, high] = [Math.min(low, 0), spec.top || (high > 0 ? high * 1.06 : 0)];
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low, low + 1];
  return makeScale(low, high, bottom, size.above, { log });
}

function drawAxes(spec, across, up, size) {
  const right = size.width - size.right, bottom = size.height - size.below;
  const clipped = (text) => text.length > 26 ? `${text.slice(0, 25)}…` : text;
  return [
    ...up.marks.flatMap((y) => [
      shape("line", { class: "gridline", x1: size.left, x2: right, y1: up.at(y), y2: up.at(y) }),
      shape("text", { class: "tick lane", x: size.left - 6, y: up.at(y) + 4, "text-anchor": "end" }, clipped(up.label(y)))]),
    ...across.marks.map((x) => shape("text", { class: "tick", x: across.at(x), y: bottom + 16, "text-anchor": "middle" }, across.label(x))),
    shape("text", { class: "name", x: (size.left + right) / 2, y: size.height - 4, "text-anchor": "middle" }, spec.across ?? "step"),
  ];
}

// ---- lines --------------------------------------------------------------------------------------

// Points with a place on the plot. Those beyond the zoom stay, so that lines leave at its edges.
const usable = (line, up, across) => line.x.map((x, i) => [x, line.y[i], i]).filter(([x, y]) => x != null && y != null && Number.isFinite(up.at(y)) && Number.isFinite(across.at(x)));

function path(points, across, up) {
  return points.map(([x, y], i) => `${i ? "L" : "M"}${across.at(x).toFixed(1)} ${up.at(y).toFixed(1)}`).join("");
}

function drawLine(spec, line, index, count, across, up) {
  const ink = colorOf(line, index), points = usable(line, up, across), kind = spec.kind ?? "lines", floor = up.at(Math.max(up.low, Math.min(0, up.high)));
  if (!points.length) return [];
  if (kind === "spans") return points.map(([x, y, i]) => shape("rect", { x: across.at(x), width: Math.max(across.at(line.until[i]) - across.at(x), 0.5), y: up.at(y - 0.36), height: up.at(y + 0.36) - up.at(y - 0.36), fill: ink }));
  if (kind === "points") return points.map(([x, y]) => shape("circle", { cx: across.at(x), cy: up.at(y), r: 4.5, fill: ink }));
  if (kind === "bars") {
    const width = (across.at(1) - across.at(0)) * 0.8 / count;
    return points.map(([x, y]) => shape("rect", { x: across.at(x) + (index - count / 2) * width, width, y: Math.min(up.at(y), floor), height: Math.abs(up.at(y) - floor), fill: ink }));
  }
  const area = (high, low, opacity) => shape("path", { d: `${path(high, across, up)}${path(low.reverse(), across, up).replace("M", "L")}Z`, fill: ink, "fill-opacity": opacity });
  const bound = (values) => usable({ x: line.x, y: values }, up, across);
  const drawn = line.low?.length ? [area(bound(line.high), bound(line.low), kind === "areas" ? 0.8 : 0.15)] : [];
  if (kind === "areas") return drawn;
  drawn.push(shape("path", { class: "line", d: path(points, across, up), stroke: ink, "stroke-dasharray": dashOf(line, index) }));
  if (points.length < 40) drawn.push(...points.map(([x, y]) => shape("circle", { cx: across.at(x), cy: up.at(y), r: 2.5, fill: ink })));
  return drawn;
}

// Areas lie on each other: y becomes the band between the sums below and above.
function stacked(lines) {
  const sums = new Map();
  return lines.map((line) => {
    const low = line.x.map((x) => sums.get(x) ?? 0);
    line.x.forEach((x, i) => sums.set(x, low[i] + (line.y[i] ?? 0)));
    return { ...line, own: line.y, low, high: line.x.map((x) => sums.get(x)), y: line.x.map((x) => sums.get(x)) };
  });
}

// ---- hover and zoom -----------------------------------------------------------------------------

function nearest(line, x) {
  let best = -1;
  line.x.forEach((value, i) => { if (line.y[i] != null && (best < 0 || Math.abs(value - x) < Math.abs(line.x[best] - x))) best = i; });
  return best;
}

// What a pointer at pixel (left, top) means: a heading and rows of [line index, label, value].
function describe(spec, lines, across, up, left, top) {
  const x = across.back(left), kind = spec.kind ?? "lines", found = [];
  if (kind === "spans") {
    const lane = Math.round(up.back(top));
    for (const [index, line] of lines) line.x.forEach((start, i) => { if (line.y[i] === lane && start <= x && x <= line.until[i]) found.push([index, line.label, `${number(line.until[i] - start)}`]); });
    return [`${spec.y_names[lane] ?? ""} at ${number(x)}`, found];
  }
  if (kind === "points") {
    let best = 900;
    for (const [index, line] of lines) line.x.forEach((at, i) => {
      const far = (across.at(at) - left) ** 2 + (up.at(line.y[i]) - top) ** 2;
      if (far < best) { best = far; found.splice(0, 1, [index, line.label || (spec.y_names ?? [])[line.y[i]], `${number(at)}${spec.y_names ? "" : `, ${number(line.y[i])}`}`]); }
    });
    return ["", found];
  }
  let chosen = null;
  for (const [, line] of lines) { const i = nearest(line, x); if (i >= 0 && (chosen == null || Math.abs(line.x[i] - x) < Math.abs(chosen - x))) chosen = line.x[i]; }
  if (chosen == null) return ["", []];
  for (const [index, line] of lines) {
    const i = nearest(line, chosen);
    if (i < 0 || Math.abs(across.at(line.x[i]) - across.at(chosen)) > 12) continue;
    const band = line.low?.length && kind === "lines" ? ` [${number(line.low[i])}, ${number(line.high[i])}]` : "";
    found.push([index, line.label, number((line.own ?? line.y)[i], 4) + band]);
  }
  return [`${spec.across ?? "step"} ${spec.x_names?.[chosen] ?? number(chosen, 6)}`, found];
}

function pointerEvents(figure, spec, lines, across, up, size, canvas, tip) {
  let pressed = null;
  const cursor = shape("line", { class: "cursor", y1: size.above, y2: size.height - size.below, visibility: "hidden" });
  const chosen = shape("rect", { class: "chosen", y: size.above, height: size.height - size.below - size.above, visibility: "hidden" });
  canvas.append(cursor, chosen);
  const inside = (event) => {
    const box = canvas.getBoundingClientRect();
    return [Math.min(Math.max(event.clientX - box.left, size.left), box.width - size.right), event.clientY - box.top];
  };
  const hide = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); };
  canvas.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") { pressed = inside(event)[0]; canvas.setPointerCapture(event.pointerId); } });
  canvas.addEventListener("pointermove", (event) => {
    const [left, top] = inside(event);
    if (pressed != null) build(chosen, { x: Math.min(pressed, left), width: Math.abs(left - pressed), visibility: "visible" }, []);
    const [heading, rows] = describe(spec, lines, across, up, left, top);
    if (!rows.length) return hide();
    build(cursor, { x1: left, x2: left, visibility: "visible" }, []);
    tip.replaceChildren(element("div", {}, heading), ...rows.map(([index, label, value]) => element("div", {}, swatch(spec.lines[index], index), `${label} `, element("b", {}, value))));
    tip.hidden = false;
    tip.style.left = `${Math.max(0, left > figure.clientWidth / 2 ? left - tip.offsetWidth - 14 : left + 14)}px`;
  });
  canvas.addEventListener("pointerup", (event) => {
    const [left] = inside(event), from = pressed;
    pressed = null;
    chosen.setAttribute("visibility", "hidden");
    if (from != null && Math.abs(left - from) > 6) { figure.view.zoom = [Math.min(from, left), Math.max(from, left)].map(across.back); drawPlot(figure, spec); }
  });
  canvas.addEventListener("pointerleave", hide);
  canvas.addEventListener("dblclick", () => { figure.view.zoom = null; drawPlot(figure, spec); });
}

// ---- a figure -----------------------------------------------------------------------------------

const swatch = (line, index) => shape("svg", { class: "swatch", width: 20, height: 10, "aria-hidden": true }, shape("line", { x1: 0, x2: 20, y1: 5, y2: 5, stroke: colorOf(line, index), "stroke-width": 3, "stroke-dasharray": dashOf(line, index) }));

function legend(figure, spec) {
  const hidden = figure.view.hidden;
  return element("div", { class: "legend" }, ...spec.lines.map((line, index) => !line.label ? null : element("button", {
    type: "button", "aria-pressed": String(!hidden.has(line.label)),
    onclick: () => { hidden.delete(line.label) || hidden.add(line.label); drawPlot(figure, spec); },
  }, swatch(line, index), line.label)));
}

// Draw into a figure element. Zoom and hidden lines stay when it is drawn again.
function drawPlot(figure, spec) {
  figure.view ??= { zoom: null, hidden: new Set() };
  figure.spec = spec;
  const names = spec.y_names ?? [], size = { ...ROOM, width: Math.max(figure.clientWidth - 2, 260), height: HEIGHT };
  if (names.length) {
    size.height = ROOM.above + ROOM.below + names.length * (spec.kind === "spans" ? LANE : 20);
    size.left = Math.min(180, 20 + 6.5 * Math.max(...names.map((name) => name.length)));
  }
  figure.drawnWidth = figure.clientWidth;
  let lines = spec.lines.map((line, index) => [index, line]).filter(([, line]) => !figure.view.hidden.has(line.label));
  if (spec.kind === "areas") { const piles = stacked(lines.map(([, line]) => line)); lines = lines.map(([index], i) => [index, piles[i]]); }
  const bare = lines.map(([, line]) => line), across = xScale(spec, bare, figure.view.zoom, size), up = yScale(spec, bare, across, size);
  const canvas = shape("svg", { class: "canvas", width: size.width, height: size.height, role: "img", "aria-label": `${spec.title}: ${spec.unit}` }), tip = element("div", { class: "tip", hidden: true });
  const window = `window-${drawPlot.count = (drawPlot.count ?? 0) + 1}`;
  canvas.append(shape("clipPath", { id: window }, shape("rect", { x: size.left, y: 0, width: size.width - size.left - size.right, height: size.height - size.below + 3 })), ...drawAxes(spec, across, up, size),
    shape("g", { "clip-path": `url(#${window})` }, ...lines.flatMap(([index, line]) => drawLine(spec, line, index, spec.lines.length, across, up))),
    ...(spec.notes ?? []).map(([x, y, text]) => shape("text", { class: "name", x: across.at(x) + 7, y: up.at(y) - 6 }, text)));
  const opened = figure.querySelector("details")?.open ?? false, meanings = Object.entries(spec.metrics ?? {});
  figure.replaceChildren(
    ...(spec.title ? [element("figcaption", {}, element("b", {}, spec.title), spec.unit ? element("span", { class: "soft" }, ` ${spec.unit}`) : null)] : []),
    legend(figure, spec), element("div", { class: "draw" }, canvas, tip),
    ...(meanings.length ? [element("details", { open: opened }, element("summary", {}, "what is drawn"), ...meanings.map(([name, text]) => element("div", {}, element("code", {}, name), ` ${text}`)))] : []));
  pointerEvents(figure, spec, lines, across, up, size, canvas, tip);
  resized.observe(figure);
}

const resized = new ResizeObserver((entries) => entries.forEach(({ target }) => { if (target.isConnected && target.clientWidth && target.clientWidth !== target.drawnWidth) drawPlot(target, target.spec); }));

// A page that is one file carries its plots; the page of `asyncrl watch` asks for them.
const carried = document.getElementById("plots");
if (carried) {
  document.documentElement.classList.toggle("dark", matchMedia("(prefers-color-scheme: dark)").matches);
  const specs = JSON.parse(carried.textContent);
  for (const figure of document.querySelectorAll("figure[data-plot]")) drawPlot(figure, specs[Number(figure.dataset.plot)]);
}
