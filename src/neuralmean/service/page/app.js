"use strict";
// No library, no build step, no request to another site. Numbers come from /live/setup, /live and /score.

const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const KEPT = 400;
let setup = null;
let items = [];
let last = 0;
let shownFlags = "";
let thumbnails = new Map(); // number -> blob address

// ---- requests

function token() { return sessionStorage.getItem("nmd-token"); }

async function ask(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  if (token()) headers.Authorization = `Bearer ${token()}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.status === 401) { askForToken(); throw new Error("This server needs a token."); }
  return response;
}

async function askJson(path, options) {
  const response = await ask(path, options);
  const answer = await response.json().catch(() => ({ error: "The server's answer could not be read." }));
  if (!response.ok) throw new Error(answer.error || `The server answered ${response.status}.`);
  return answer;
}

function askForToken() {
  const dialog = byId("token-dialog");
  if (dialog.open) return;
  byId("token-problem").hidden = !token();
  sessionStorage.removeItem("nmd-token");
  dialog.showModal();
}

byId("token-form").addEventListener("submit", () => {
  sessionStorage.setItem("nmd-token", byId("token").value.trim());
  byId("token").value = "";
  poll();
});

// ---- drawing

function node(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function draw(id, height, build) {
  const svg = byId(id);
  const width = Math.max(240, svg.clientWidth || 600); // one unit is one pixel, so that text stays legible on a phone
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const parts = [];
  const add = (name, attributes, text) => {
    parts.push(node(name, attributes, text));
    return parts[parts.length - 1];
  };
  build(add, width, height);
  svg.replaceChildren(...parts);
}

const short = (value) => (value === null || value === undefined ? "–" : Number(value).toPrecision(3).replace(/\.?0+$/, ""));
const percent = (value) => `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)}\u00a0%`;
const count = (value) => value.toLocaleString("en");

function drawDistribution(result) {
  const { counts, edges } = setup.histogram;
  const low = Math.min(edges[0], result.score), high = Math.max(edges[edges.length - 1], result.score);
  const margin = 0.04 * (high - low || 1);
  draw("distribution", 170, (add, width, height) => {
    const x = (value) => (width * (value - low + margin)) / (high - low + 2 * margin);
    const top = Math.max(...counts, 1), base = height - 22;
    counts.forEach((n, i) => {
      const bar = (n / top) * (base - 26);
      add("rect", { class: "bar", x: x(edges[i]), y: base - bar, width: Math.max(1, x(edges[i + 1]) - x(edges[i]) - 1), height: bar });
    });
    add("line", { class: "rule", x1: x(setup.threshold), x2: x(setup.threshold), y1: 4, y2: base });
    const right = x(setup.threshold) + 120 > width;
    add("text", { x: x(setup.threshold) + (right ? -5 : 5), y: height - 6, "text-anchor": right ? "end" : "start" }, `threshold ${short(setup.threshold)}`);
    add("line", { class: `mark${result.is_ood ? " bad" : ""}`, x1: x(result.score), x2: x(result.score), y1: 20, y2: base });
    const anchor = x(result.score) + 70 > width ? "end" : x(result.score) < 70 ? "start" : "middle";
    add("text", { x: x(result.score), y: 14, "text-anchor": anchor }, `this image ${short(result.score)}`);
  });
  byId("distribution-text").textContent =
    `Bars: scores of ${count(setup.n_held_out)} held-out in-distribution images; higher is stranger. P-value ${short(result.p_value)}.`;
}

function drawProfile(result) {
  const values = result.layers.map((layer) => layer.contribution / layer.n_channels);
  const top = Math.max(...values, 0), bottom = Math.min(...values, 0), span = top - bottom || 1;
  const order = values.map((_, i) => i).sort((a, b) => values[b] - values[a]);
  const strongest = order.slice(0, 3).filter((i) => values[i] > 0);
  draw("profile", 170, (add, width, height) => {
    const room = height - 30, step = width / values.length, zero = 8 + (room * top) / span;
    values.forEach((value, i) => {
      const length = (Math.abs(value) * room) / span;
      const kind = strongest.includes(i) ? (result.is_ood ? " bad" : " good") : "";
      const bar = add("rect", {
        class: `bar${kind}`, x: i * step + 0.5, width: Math.max(1, step - 1), y: value >= 0 ? zero - length : zero, height: Math.max(0.5, length),
      });
      bar.append(node("title", {}, `${result.layers[i].layer}: ${short(value)} per channel`));
    });
    add("text", { x: 4, y: height - 6 }, "first layer");
    add("text", { x: width - 4, y: height - 6, "text-anchor": "end" }, "last layer");
  });
  const names = strongest.map((i) => `${result.layers[i].layer} (${short(values[i])})`);
  byId("profile-text").textContent = names.length
    ? `Contribution to the score per channel, strongest: ${names.join(", ")}.`
    : "No layer raises the score.";
}

function drawStream() {
  const latest = items.slice(-200);
  if (!latest.length || !setup) return;
  const scores = latest.map((item) => item.score).concat([setup.threshold, setup.histogram.edges[0]]);
  const low = Math.min(...scores), high = Math.max(...scores), margin = 0.06 * (high - low || 1);
  draw("stream", 180, (add, width, height) => {
    const y = (value) => height - (height * (value - low + margin)) / (high - low + 2 * margin);
    add("line", { class: "rule", x1: 0, x2: width, y1: y(setup.threshold), y2: y(setup.threshold) });
    latest.forEach((item, i) => {
      const x = width - 8 - ((latest.length - 1 - i) * (width - 80)) / 199, top = y(item.score); // the label has the left
      // Flagged ones are triangles: not everyone can tell the colours apart.
      if (item.is_ood) add("path", { class: "dot bad", d: `M${x} ${top - 5}l5 9h-10z` });
      else add("circle", { class: "dot", cx: x, cy: top, r: 2.6 });
    });
    add("text", { x: 4, y: Math.max(12, y(setup.threshold) - 4) }, "threshold");
  });
  const flagged = latest.filter((item) => item.is_ood).length;
  byId("stream-text").textContent =
    `The latest ${count(latest.length)} scores, newest on the right; ▲ flagged (${flagged}). Last score ${short(latest[latest.length - 1].score)}.`;
}

function drawPValues(monitor) {
  const counts = monitor.window_p_value_counts;
  const top = Math.max(...counts, 1), level = monitor.n_window / counts.length;
  draw("p-values", 110, (add, width, height) => {
    const base = height - 20, step = width / counts.length, scale = (base - 6) / Math.max(top, 2 * level, 1);
    counts.forEach((n, i) => add("rect", { class: `bar${i === 0 && n > 2 * level + 3 ? " bad" : ""}`, x: i * step + 1, width: step - 2, y: base - n * scale, height: n * scale }));
    if (monitor.n_window) add("line", { class: "rule", x1: 0, x2: width, y1: base - level * scale, y2: base - level * scale });
    add("text", { x: 4, y: height - 5 }, "0 unusual");
    add("text", { x: width - 4, y: height - 5, "text-anchor": "end" }, "1 typical");
  });
}

// ---- the live part

function showMonitor(monitor) {
  byId("n-seen").textContent = count(monitor.n_seen);
  byId("rate").textContent = monitor.window_ood_rate === null ? "–" : percent(monitor.window_ood_rate);
  byId("rate-text").textContent = `of the last ${count(monitor.n_window)}; ${percent(monitor.expected_ood_rate)} is usual` +
    (monitor.window_most_false === null || !monitor.window_n_flagged ? "" : `. At most ${count(monitor.window_most_false)} of these ${count(monitor.window_n_flagged)} flags are false, 95\u00a0% sure`);
  byId("evidence").textContent = odds(monitor.log10_evidence);
  byId("evidence-text").textContent = `against “nothing has changed”; alarm at ${odds(monitor.log10_needed)}` + (monitor.every > 1 ? `. Neighbouring inputs are correlated: one in ${monitor.every} is used` : "");
  byId("meter").style.width = `${Math.max(0, Math.min(100, (100 * monitor.log10_evidence) / monitor.log10_needed))}%`;
  byId("meter").parentElement.classList.toggle("bad", monitor.drift);
  byId("guarantee").textContent = `${setup.guarantee} ${monitor.guarantee}`;
  const state = byId("state");
  state.className = `state ${monitor.drift ? "bad" : "good"}`;
  setText(state, monitor.drift ? "The stream has shifted" : "No drift");
  document.title = `${monitor.drift ? "▲ " : ""}${setup.name} – neuralmean`;
  byId("drift").hidden = !monitor.drift;
  if (monitor.drift) {
    setText(byId("drift-title"), "▲ The stream has shifted");
    const how = { items: "the scores of single inputs", blocks: "the mean of many inputs together", repeats: "repeated inputs" }[monitor.drift_by];
    const alarm = monitor.alarm, [from, to] = alarm.since;
    const moved = monitor.layers.filter((layer) => layer.moved).slice(0, 3).map((layer) => layer.layer);
    const when = monitor.drift_time ? `, ${new Date(monitor.drift_time * 1000).toLocaleString()}` : "";
    const since = from === to ? `with input ${count(from)}` : `between inputs ${count(from)} and ${count(to)}`;
    setText(byId("drift-text"), `${monitor.sentence} Noticed at input ${count(monitor.drift_at)}${when}, by ${how}. It began ${since}; ` +
      `${count(alarm.n_flagged)} of the ${count(alarm.n_since)} inputs until the alarm were flagged.` + (moved.length ? ` Layers that moved most: ${moved.join(", ")}.` : ""));
  }
  byId("reference").hidden = monitor.reference === "held-out data";
  setText(byId("reference-text"), `The stream is compared with ${monitor.reference}.`);
  drawPValues(monitor);
  showLayers(monitor);
}

function setText(element, text) { if (element.textContent !== text) element.textContent = text; } // no needless announcements

function odds(log10) {
  if (log10 < 0.3) return "none";
  if (log10 < 6) return `${count(Number((10 ** log10).toPrecision(2)))} to 1`;
  return log10 < 9 ? "over a million to 1" : log10 < 12 ? "over a billion to 1" : "beyond doubt";
}

function showLayers(monitor) {
  const young = monitor.compared_with === "the training data" && !monitor.drift;
  const layers = young ? [] : monitor.layers.slice(0, 6);
  const top = Math.max(...layers.map((layer) => layer.shift), 0.5);
  byId("layers").replaceChildren(...layers.map((layer) => {
    const row = document.createElement("li");
    row.className = layer.moved ? "moved" : "";
    const name = document.createElement("span"), track = document.createElement("span"), fill = document.createElement("span"), number = document.createElement("span");
    name.className = "layer"; name.textContent = layer.layer;
    track.className = "track"; fill.style.width = `${(100 * layer.shift) / top}%`; track.append(fill);
    number.className = "number"; number.textContent = layer.shift.toFixed(2);
    row.append(name, track, number);
    return row;
  }));
  byId("layers-text").textContent = layers.length
    ? `Move of the mean of the last ${count(monitor.n_compared)} inputs, in standard deviations, against ${monitor.compared_with}. ${monitor.n_moved} of ${monitor.n_layers} layers moved more than chance explains.`
    : `Too early to say${young ? `: the first ${count(monitor.window)} inputs become the standard` : ""}.`;
}

async function showFlagged(flagged) {
  if (!setup.thumbnails || !setup.images) { byId("flagged-part").hidden = true; return; }
  const key = flagged.map((item) => item.number).join();
  if (key === shownFlags) return;
  shownFlags = key;
  const kept = new Set(flagged.map((item) => item.number));
  for (const [number, address] of thumbnails) if (!kept.has(number)) { URL.revokeObjectURL(address); thumbnails.delete(number); }
  byId("flagged-text").textContent = flagged.length ? "As the model saw them, newest first." : "None yet.";
  await Promise.all(flagged.filter((item) => !thumbnails.has(item.number)).map(async (item) => {
    const response = await ask(`/live/flagged/${item.number}`).catch(() => null);
    if (response && response.ok) thumbnails.set(item.number, URL.createObjectURL(await response.blob()));
  }));
  if (key !== shownFlags) return; // newer ones have arrived meanwhile
  byId("flagged").replaceChildren(...flagged.filter((item) => thumbnails.has(item.number)).map((item) => {
    const entry = document.createElement("li"), picture = document.createElement("img"), text = document.createElement("span");
    picture.src = thumbnails.get(item.number);
    picture.alt = `Flagged input ${item.number}`;
    const line = [`#${item.number}`, ...(item.predicted === null ? [] : [`class ${item.predicted}`]), `p ${Number(item.p_value.toPrecision(1))}`];
    text.textContent = line.map((part) => part.replace(" ", "\u00a0")).join(", ");
    entry.append(picture, text);
    return entry;
  }));
}

let timer = 0;
async function poll() {
  clearTimeout(timer);
  try {
    if (!setup) {
      setup = await askJson("/live/setup");
      byId("name").textContent = setup.name;
      if (!setup.images) { byId("drop").hidden = true; problem("This detector has no preprocessing for images; send tensors to /v2/models."); }
    }
    const live = await askJson(`/live?since=${last}`);
    if (live.number < last) { last = 0; items = []; shownFlags = ""; } // the server was restarted
    else { last = live.number; items = items.concat(live.items).slice(-KEPT); }
    showMonitor(live.monitor);
    drawStream();
    await showFlagged(live.flagged);
    await showHistory(false);
  } catch (error) {
    byId("state").className = "state";
    setText(byId("state"), error instanceof TypeError ? "No connection to the server" : error.message);
  }
  if (!byId("token-dialog").open) timer = setTimeout(poll, document.hidden ? 10000 : 1000);
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });

for (const name of ["reset", "accept", "revert"]) byId(name).addEventListener("click", async () => {
  try { await askJson(`/live/${name}`, { method: "POST" }); byId("file").focus(); await poll(); } catch (error) { setText(byId(name === "revert" ? "reference-text" : "drift-text"), error.message); }
});

// ---- the history

let span = "hours";
let historyAt = 0;
const openAlarms = new Set();

async function showHistory(force) {
  if (!setup.history || (!force && Date.now() - historyAt < 15000)) return;
  historyAt = Date.now();
  byId("history-part").hidden = false;
  const answer = await askJson(`/history?span=${span}`);
  drawHistory(answer.rows);
  byId("alarms").replaceChildren(...answer.alarms.slice(0, 20).map(alarmEntry));
}

function drawHistory(rows) {
  const top = Math.max(...rows.map((row) => row.n), 1);
  draw("history", 150, (add, width, height) => {
    const base = height - 22, step = width / rows.length, scale = (base - 16) / top;
    rows.forEach((row, i) => {
      const bar = add("rect", { class: "bar", x: i * step + 0.5, width: Math.max(1, step - 1), y: base - row.n * scale, height: row.n * scale });
      bar.append(node("title", {}, `${stamp(row.start)}: ${count(row.n)} inputs, ${count(row.n_ood)} flagged`));
      add("rect", { class: "bar bad", x: i * step + 0.5, width: Math.max(1, step - 1), y: base - row.n_ood * scale, height: row.n_ood * scale });
      if (row.n_alarms) add("path", { class: "dot bad", d: `M${(i + 0.5) * step} 3l5 9h-10z` });
    });
    add("text", { x: 4, y: height - 6 }, stamp(rows[0].start));
    add("text", { x: width - 4, y: height - 6, "text-anchor": "end" }, "now");
  });
  const total = rows.reduce((sum, row) => sum + row.n, 0), flagged = rows.reduce((sum, row) => sum + row.n_ood, 0);
  const each = { hours: "half an hour", days: "a day", weeks: "a week" }[span];
  byId("history-text").textContent = `${count(total)} inputs, ${count(flagged)} flagged (coloured part). A bar is ${each}; ▲ marks an alarm.`;
}

const stamp = (seconds) => new Date(seconds * 1000).toLocaleString([], span === "hours" ? { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" } : { day: "numeric", month: "short" });

function alarmEntry(alarm) {
  const entry = document.createElement("details"), title = document.createElement("summary"), text = document.createElement("p"), pictures = document.createElement("ul");
  title.textContent = `▲ ${new Date(alarm.time * 1000).toLocaleString()}${alarm.ended ? "" : " (on)"}`;
  const layers = alarm.layers && alarm.layers.length ? ` Layers: ${alarm.layers.slice(0, 5).join(", ")}.` : "";
  text.className = "small";
  text.textContent = `${alarm.sentence} Input ${count(alarm.item)}, began between ${count(alarm.since[0])} and ${count(alarm.since[1])}; ${alarm.n_flagged} of ${alarm.n_since} flagged.${layers}`;
  pictures.className = "flagged";
  entry.append(title, text, pictures);
  const load = async () => {
    openAlarms.add(alarm.id);
    for (const number of alarm.examples) {
      const response = await ask(`/history/pictures/${number}`).catch(() => null);
      if (!response || !response.ok) continue;
      const item = document.createElement("li"), picture = document.createElement("img");
      picture.src = URL.createObjectURL(await response.blob()); picture.alt = `Input ${number}`;
      item.append(picture); pictures.append(item);
    }
  };
  entry.open = openAlarms.has(alarm.id);
  if (entry.open) load();
  entry.addEventListener("toggle", () => { if (!entry.open) openAlarms.delete(alarm.id); else if (!openAlarms.has(alarm.id)) load(); });
  return entry;
}

for (const button of document.querySelectorAll("[data-span]")) button.addEventListener("click", () => {
  span = button.dataset.span;
  for (const other of document.querySelectorAll("[data-span]")) other.setAttribute("aria-pressed", String(other === button));
  showHistory(true);
});

// ---- checking one image

function problem(text) {
  byId("problem").textContent = text;
  byId("problem").hidden = !text;
}

let preview = "";
let shown = null;
async function check(file) {
  if (!file) return;
  problem("");
  byId("result").classList.add("busy");
  try {
    const form = new FormData();
    form.append("file", file, file.name || "image");
    const answer = await askJson("/score?explain=true&watch=false", { method: "POST", body: form });
    showResult(answer.results[0], file);
  } catch (error) {
    byId("result").hidden = true;
    problem(error instanceof TypeError ? "No connection to the server." : error.message);
  }
  byId("result").classList.remove("busy");
}

function showResult(result, file) {
  if (preview) URL.revokeObjectURL(preview);
  preview = URL.createObjectURL(file);
  byId("preview").src = preview;
  shown = result;
  byId("result").hidden = false;
  byId("verdict").className = `verdict${result.is_ood ? " bad" : ""}`;
  byId("verdict").textContent = result.is_ood ? "▲ Out of distribution" : "● In distribution";
  byId("kind").textContent = result.kind_sentence;
  byId("map").hidden = !result.map;
  if (result.map) byId("map").src = result.map;
  byId("sentence").textContent = result.sentence;
  byId("predicted").textContent = result.predicted === undefined ? "" : `The model says class ${result.predicted}.`;
  byId("reason").textContent = result.reason;
  if (setup) drawDistribution(result);
  drawProfile(result);
}

const drop = byId("drop");
byId("file").addEventListener("change", (event) => { check(event.target.files[0]); event.target.value = ""; });
for (const name of ["dragenter", "dragover"]) document.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
for (const name of ["dragleave", "drop"]) document.addEventListener(name, (event) => { event.preventDefault(); drop.classList.remove("over"); });
document.addEventListener("drop", (event) => check(event.dataTransfer.files[0]));
document.addEventListener("paste", (event) => check([...event.clipboardData.files].find((file) => file.type.startsWith("image/"))));

addEventListener("resize", () => {
  if (!shown || !setup) return;
  drawDistribution(shown);
  drawProfile(shown);
});

poll();
