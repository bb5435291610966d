"use strict";
// Shows samples with every token colored by one of its values (SamplesBlock in page_kit.py). Loaded
// after plot.js. Foreign text is only ever set as text.

function painter(values) {
  const numbers = values.filter((x) => typeof x === "number"), names = [...new Set(values.filter((x) => typeof x === "string"))];
  const largest = Math.max(...numbers.map(Math.abs), 0) || 1;
  return (value) => value == null ? "" : typeof value === "string" ? `background:${COLORS[names.indexOf(value) % COLORS.length]}44` :
    `background:rgba(${value > 0 ? "239,68,68" : "59,130,246"},${(0.75 * Math.min(Math.abs(value) / largest, 1)).toFixed(3)})`;
}

function picture(image) {
  const size = `${image.size[0]} x ${image.size[1]} pixels`;
  const shown = image.thumbnail.startsWith("data:image/png;base64,") ? image.thumbnail : "";
  return element("img", { class: "picture", src: shown, alt: size, title: `${size}, ${image.digest}` });
}

function conversation(sequence, shade) {
  const values = sequence.shades[shade];
  const paint = painter(values ?? []);
  const turns = [element("div", { class: "turn" }, element("div", { class: "who" }, "prompt"), sequence.prompt, ...(sequence.images ?? []).map(picture))];
  let turn = null, kind = null;
  sequence.pieces.forEach((piece, i) => {
    const source = sequence.shades.version[i] == null ? "environment" : "model";
    if (source !== kind) {
      turn = element("div", { class: `turn ${source}` }, element("div", { class: "who" }, source === "model" ? "response" : "from the environment, not sampled"));
      turns.push(turn);
      kind = source;
    }
    const facts = Object.entries(sequence.shades).map(([name, values]) => `${name} ${typeof values[i] === "number" ? number(values[i]) : values[i] ?? "not measured"}`);
    turn.append(element("span", { class: `token ${sequence.shades.used[i] || source === "environment" ? "" : "unused"}`, style: paint(values?.[i]), title: `${JSON.stringify(piece)}\n${facts.join("\n")}` }, piece));
  });
  return element("div", {}, ...turns, values ? null : element("p", { class: "soft" }, `${shade} was not measured for this batch${sequence.shades.clip ? " (record.split_every)" : ""}`));
}

function sampleBox(row, shade, more = null) {
  // rewards and the reasons of ends are unknown to a Tinker server
  const origin = row.sequence_ids ? [["datum", row.ticket], ["sequence", row.sequence_ids.join(", ") || "unknown"]] :
    [["ticket", row.ticket], ["sample", row.sample], ["reward", number(row.reward)], ...Object.entries(row.parts).map(([k, v]) => [k, number(v)])];
  const facts = [["batch", row.batch], ...origin, ["lag", `${number(row.lag_mean)} (max ${row.lag_max})`], ["tokens", row.length],
    ...(row.finish ? [["end", row.finish]] : []), ["kl", number(row.kl)], ["chosen by", row.rules.join(", ")]];
  if (row.calls) facts.push(["calls", row.calls], ["excluded tokens", row.excluded]);
  return element("article", { class: "sample" },
    element("div", { class: "head" }, ...facts.map(([name, value]) => element("span", {}, `${name} `, element("b", {}, value)))),
    ...row.sequences.map((sequence) => conversation(sequence, shade)), more);
}

// A page that is one file carries its samples.
for (const place of document.querySelectorAll("div[data-samples]")) {
  const { rows, shades } = JSON.parse(document.getElementById(place.dataset.samples).textContent);
  const meaning = element("span", { class: "soft" }), boxes = element("div", { class: "pair" });
  const choice = element("select", { onchange: () => paintAll() }, ...Object.keys(shades).map((name) => element("option", { value: name, selected: name === "lag" }, name)));
  const paintAll = () => {
    meaning.textContent = shades[choice.value];
    boxes.replaceChildren(...rows.map((row) => sampleBox(row, choice.value)));
  };
  place.append(element("div", { class: "filters" }, element("label", {}, "color ", choice), meaning), boxes);
  paintAll();
}
