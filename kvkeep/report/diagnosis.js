"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "7 4", "2 3"];
// as the packed tiers count them
const [FULL, QUANTIZED, GONE] = [0, 1, 2];

function made(name, attributes = {}, text = "") {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
}

function drawn(name, attributes, text = "") {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
}

function offer(select, options) {
  select.replaceChildren(...options.map(([value, text]) => made("option", { value }, text)));
}

const named = (arm) => (arm.policy === arm.budget ? "full cache" : `${arm.policy} · ${arm.budget}`);
const policies = [...new Set(DATA.arms.map((arm) => arm.policy))];

function look(policy) {
  const place = policies.indexOf(policy);
  return { stroke: `var(--line-${place % 7})`, "stroke-dasharray": DASHES[Math.floor(place / 7) % 3] };
}

// curves

/** Four to nine round numbers from 0 to `most` or just above it. */
function ticks(most) {
  const power = 10 ** Math.floor(Math.log10(most));
  const apart = [0.1, 0.2, 0.25, 0.5, 1].map((part) => part * power).find((one) => most / one <= 8) || 2 * power;
  return Array.from({ length: Math.ceil(most / apart - 1e-9) + 1 }, (_, index) => index * apart);
}

function drawCurves() {
  const budget = at("budget").value, name = at("curve").value;
  const arms = DATA.arms.filter((arm) => arm.budget === budget);
  const points = arms.flatMap((arm) => arm.curves[name]);
  const [wide, high, left, bottom] = [Math.max(300, at("chart").clientWidth), 300, 44, 38];
  const last = Math.max(...points.map((point) => point[0]));
  const levels = ticks(Math.max(0.01, ...points.map((point) => point[3]))), most = levels[levels.length - 1];
  const x = (step) => left + ((wide - left - 12) * step) / last;
  const y = (value) => 10 + (high - bottom - 10) * (1 - value / most);
  const svg = drawn("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": `${name} by tokens decoded` });
  for (const value of levels) {
    svg.append(drawn("line", { class: "grid", x1: left, x2: wide - 12, y1: y(value), y2: y(value) }));
    svg.append(drawn("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, `${Number((100 * value).toFixed(1))}%`));
  }
  for (const step of ticks(last).filter((step) => step <= last)) {
    svg.append(drawn("text", { x: x(step), y: high - bottom + 16, "text-anchor": "middle" }, step.toLocaleString("en")));
  }
  svg.append(drawn("text", { x: (left + wide) / 2, y: high - 4, "text-anchor": "middle" }, "tokens behind the prompt"));
  for (const arm of arms) {
    const curve = arm.curves[name], style = look(arm.policy);
    const there = curve.map((point) => `${x(point[0])} ${y(point[3])}`);
    const back = curve.map((point) => `${x(point[0])} ${y(point[2])}`).reverse();
    svg.append(drawn("path", { class: "band", d: `M${[...there, ...back].join("L")}Z`, style: `fill: ${style.stroke}` }));
    svg.append(drawn("path", { d: `M${curve.map((point) => `${x(point[0])} ${y(point[1])}`).join("L")}`, ...style }));
  }
  at("chart").replaceChildren(svg);
  at("lines").replaceChildren(...arms.map((arm) => {
    const item = made("li"), line = drawn("svg", { width: 26, height: 10, "aria-hidden": "true" });
    line.append(drawn("line", { x1: 0, x2: 26, y1: 5, y2: 5, "stroke-width": 3, ...look(arm.policy) }));
    item.append(line, arm.policy);
    return item;
  }));
}

// map

function drawMap() {
  const heads = DATA.arms[at("mapped").value].heads.missed;
  const most = Math.max(1e-9, ...heads.flat());
  // few heads to a layer: layers run across
  const rows = heads[0].map((_, head) => {
    const row = made("tr");
    row.append(made("th", { scope: "row" }, `head ${head}`));
    heads.forEach((layer, index) => {
      const cell = made("td", { role: "gridcell", "data-layer": index, "data-head": head,
        title: `layer ${index}, head ${head}: ${(100 * layer[head]).toFixed(1)}% missed` });
      cell.style.setProperty("--share", (layer[head] / most).toFixed(3));
      row.append(cell);
    });
    return row;
  });
  const scale = made("tr");
  scale.append(made("th", {}, "layer"), ...heads.map((_, index) => made("td", { style: "background: none; cursor: default" }, index % 5 ? "" : String(index))));
  at("map").replaceChildren(...rows, scale);
  markHead();
}

function markHead() {
  const layer = at("layer") ? at("layer").value : "0", head = at("head") ? at("head").value : "0";
  for (const cell of at("map").querySelectorAll("td[data-layer]")) {
    cell.setAttribute("aria-selected", String(cell.dataset.layer === layer && cell.dataset.head === head));
  }
  const share = DATA.arms[at("mapped").value].heads.missed[layer][head];
  const all = DATA.arms[at("mapped").value].heads.missed.flat(), percent = (one) => `${(100 * one).toFixed(1)}%`;
  at("cell").textContent = `layer ${layer}, head ${head}: ${percent(share)} missed (all heads: ${percent(Math.min(...all))} to ${percent(Math.max(...all))})`;
}

// tokens

const unpacked = new Map();

function unpack(text, kind) {
  return new kind(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
}

function opened(index) {
  if (!unpacked.has(index)) {
    const view = DATA.views[index];
    unpacked.set(index, { ...view, token: unpack(view.token, Int32Array), event: unpack(view.event, Int32Array),
      tier: unpack(view.tier, Uint8Array), worth: view.worth ? unpack(view.worth, Float32Array) : null });
  }
  return unpacked.get(index);
}

let view = null, fates = [], states = [], spans = [], chosen = 0;

/** Each token's moves in the chosen head: [event, tier], in order of time. */
function readFates() {
  const head = Number(at("layer").value) * view.heads + Number(at("head").value);
  fates = view.tokens.map(() => []);
  for (let move = view.starts[head]; move < view.starts[head + 1]; move++) {
    fates[view.token[move]].push([view.event[move], view.tier[move]]);
  }
}

const read = (event) => view.prompt_tokens - 1 + view.steps[event];

function stateOf(token, event) {
  const length = read(event);
  if (token >= length) return { kind: "unread" };
  if (token < view.sinks) return { kind: "kept", always: "one of the first tokens, which are always kept" };
  if (token >= length - view.recent) return { kind: "kept", always: `one of the last ${view.recent} tokens, which are always kept` };
  const past = fates[token].filter((move) => move[0] <= event);
  if (!past.length) return { kind: "kept" };
  const [since, tier] = past[past.length - 1];
  if (tier === GONE) return { kind: "gone", since };
  if (tier === QUANTIZED) return { kind: "quantized", since };
  return { kind: "revived", since };
}

const KINDS = { kept: ["kept", "in full precision"], quantized: ["quantized", "held as codes"], gone: ["dropped", ""],
  revived: ["revived", "dropped or coded before"], unread: ["to come", ""] };

function showTokens() {
  const event = Number(at("step").value), counts = {};
  states = view.tokens.map((_, token) => stateOf(token, event));
  states.forEach((state, token) => {
    spans[token].className = `${state.kind}${state.always ? " always" : ""}${token === chosen ? " on" : ""}`;
    counts[state.kind] = (counts[state.kind] || 0) + 1;
  });
  at("moment").textContent = `${read(event).toLocaleString("en")} tokens read, ${view.steps[event].toLocaleString("en")} behind the prompt`;
  at("counts").replaceChildren(...Object.entries(KINDS).map(([kind, [word, more]]) => {
    const item = made("li");
    item.append(made("span", { class: `swatch ${kind}`, "aria-hidden": "true" }, "ab"), `${word}${more ? ` (${more})` : ""}: ${(counts[kind] || 0).toLocaleString("en")}`);
    return item;
  }));
  tell();
}

function worthOf(token) {
  if (!view.worth) return null;
  const head = Number(at("layer").value) * view.heads + Number(at("head").value);
  const worth = view.worth[head * view.length + token];
  return Number.isNaN(worth) || Math.abs(worth) > 1e38 ? null : worth;
}

function when(since) {
  return since === 0 ? "when the prompt was compressed, or right after" : `at about ${read(since).toLocaleString("en")} tokens`;
}

function reason(token) {
  const state = states[token], worth = worthOf(token);
  const judged = worth === null ? "" : ` Worth when last judged: ${worth.toPrecision(4)}${rank(token, worth)}.`;
  if (state.kind === "unread") return "Not read yet.";
  if (state.always) return `Kept: ${state.always}.`;
  if (state.kind === "gone") return `Dropped ${when(state.since)}: others were worth more.${judged}`;
  if (state.kind === "quantized") return `Held as codes since ${when(state.since)}.${judged}`;
  if (state.kind === "revived") return `Came back ${when(state.since)}.${judged}`;
  return `Kept: among those of greatest worth.${judged}`;
}

function rank(token, worth) {
  const others = states.flatMap((state, other) => (state.kind === "kept" && !state.always && other !== token ? [worthOf(other)] : [])).filter((other) => other !== null);
  if (!others.length) return "";
  const above = others.filter((other) => other > worth).length;
  return `, ${above.toLocaleString("en")} of the ${others.length.toLocaleString("en")} others kept are worth more`;
}

function tell() {
  const told = at("told"), text = view.tokens[chosen];
  told.replaceChildren(made("b", {}, `Token ${chosen.toLocaleString("en")} `), made("code", {}, JSON.stringify(text)), made("br"), reason(chosen));
}

function choose(token) {
  spans[chosen].classList.remove("on");
  chosen = Math.max(0, Math.min(view.tokens.length - 1, token));
  spans[chosen].classList.add("on");
  tell();
}

function openView() {
  const before = at("step").value;
  view = opened(Number(at("view").value));
  const layers = (view.starts.length - 1) / view.heads;
  if (at("layer").options.length !== layers) offer(at("layer"), Array.from({ length: layers }, (_, index) => [index, index]));
  if (at("head").options.length !== view.heads) offer(at("head"), Array.from({ length: view.heads }, (_, index) => [index, index]));
  at("step").max = view.steps.length - 1;
  at("step").value = Math.min(Number(before), view.steps.length - 1);
  spans = view.tokens.map((text, token) => made("span", { "data-token": token }, text));
  chosen = Math.min(chosen, spans.length - 1);
  at("tokens").replaceChildren(...spans);
  readFates();
  showTokens();
}

function headChanged() {
  readFates();
  showTokens();
  markHead();
}

function start() {
  offer(at("budget"), [...new Set(DATA.arms.filter((arm) => arm.policy !== arm.budget).map((arm) => arm.budget))].map((one) => [one, one]));
  if (!at("budget").options.length) offer(at("budget"), [["full", "full"]]);
  offer(at("mapped"), DATA.arms.map((arm, index) => [index, named(arm)]));
  at("mapped").value = String(Math.max(0, DATA.arms.findIndex((arm) => arm.policy !== arm.budget)));
  at("budget").addEventListener("change", drawCurves);
  at("curve").addEventListener("change", drawCurves);
  at("mapped").addEventListener("change", drawMap);
  new ResizeObserver(drawCurves).observe(at("chart"));
  if (at("view")) startView();
  drawMap();
  at("map").addEventListener("click", (event) => {
    const cell = event.target.closest("td[data-layer]");
    if (!cell || !at("layer")) return;
    at("layer").value = cell.dataset.layer;
    at("head").value = cell.dataset.head;
    headChanged();
  });
}

function startView() {
  const many = new Set(DATA.views.map((one) => `${one.source} ${one.name}`)).size > 1;
  offer(at("view"), DATA.views.map((one, index) => [index, many ? `${named(one)} · ${one.source} ${one.name}` : named(one)]));
  at("view").addEventListener("change", openView);
  for (const id of ["layer", "head"]) at(id).addEventListener("change", headChanged);
  at("step").addEventListener("input", showTokens);
  at("tokens").addEventListener("pointerover", (event) => {
    if (event.target.dataset.token) choose(Number(event.target.dataset.token));
  });
  at("tokens").addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    choose(chosen + by);
    spans[chosen].scrollIntoView({ block: "nearest" });
  });
  openView();
}

start();
