// The page at `/`: it asks `page/live` each second and draws the last two minutes; its form streams an answer from the server's own API.
// Nothing is kept but in this script's variables.

const SECONDS_SHOWN = 120;
const POLL_MS = 1000;
const SVG = "http://www.w3.org/2000/svg";

const byId = (id) => document.getElementById(id);

function element(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function inUnits(value, unit) {
  if (value === null) return "–";
  if (unit === "s") return value < 1 ? `${(value * 1000).toFixed(value < 0.1 ? 1 : 0)} ms` : `${value.toFixed(1)} s`;
  if (unit === "%") return `${(value * 100).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
  return value < 10 && value % 1 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

// The smallest of 1, 2, 5, 10 … that is at least `value`.
function roundedUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((digit) => digit * power).find((bound) => bound >= value * 0.999);
}

// A chart of one or two lines. `read` takes a sample and returns a number for each line; null leaves a gap.
class Chart {
  constructor(title, unit, names, read, ceiling = null) {
    Object.assign(this, { title, unit, names, read, ceiling });
    this.figure = element("figure");
    const caption = element("figcaption");
    this.values = element("span", "", "values");
    caption.append(element("span", title), this.values);
    this.top = element("div", "", "top");
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("viewBox", `0 0 ${SECONDS_SHOWN} 100`);
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("role", "img");
    this.paths = names.map((_, line) => {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("class", `line-${line}`);
      this.svg.append(path);
      return path;
    });
    const plot = element("div", "", "plot");
    plot.append(this.top, this.svg);
    this.figure.append(caption, plot);
    byId("charts").append(this.figure);
  }

  draw(samples, now) {
    const lines = this.names.map((_, line) => samples.map((sample) => [sample.at - now + SECONDS_SHOWN, this.read(sample)[line]]));
    const largest = Math.max(0, ...lines.flat().map(([, value]) => value ?? 0));
    const bound = this.ceiling ?? (largest > 0 ? roundedUp(largest) : 1);
    lines.forEach((points, line) => this.paths[line].setAttribute("d", pathOf(points, bound)));
    this.top.textContent = inUnits(bound, this.unit);
    const last = (points) => (this.unit === "s" ? points.findLast(([, value]) => value !== null) : points.at(-1)); // a time stays until the next
    const latest = lines.map((points) => inUnits(last(points)?.[1] ?? null, this.unit));
    const named = latest.map((value, line) => (this.names[line] ? `${this.names[line]} ${value}` : value));
    this.svg.setAttribute("aria-label", `${this.title}: ${named.join(", ")}; most in two minutes: ${inUnits(largest, this.unit)}`);
    this.values.replaceChildren(...latest.map((value, line) => {
      const shown = element("span", this.names[line] ? `${this.names[line]} ` : "", `line-${line}`);
      shown.append(element("b", value));
      return shown;
    }));
  }
}

// A line through the points, broken where a value is missing; a point by itself is a dot.
function pathOf(points, bound) {
  let path = "";
  let drawing = false;
  for (const [x, value] of points) {
    if (value === null) {
      drawing = false;
      continue;
    }
    const at = `${x.toFixed(2)} ${(100 - (100 * Math.min(value, bound)) / bound).toFixed(2)}`;
    path += drawing ? `L${at}` : `M${at}L${at}`;
    drawing = true;
  }
  return path;
}

const charts = [
  new Chart("Requests", "", ["running", "waiting"], (s) => [s.running, s.waiting]),
  new Chart("Generated tokens per second", "", [""], (s) => [s.tokens_per_s]),
  new Chart("KV cache", "%", ["held", "cached"], (s) => [s.held, s.cached], 1),
  new Chart("Time to first token, mean", "s", [""], (s) => [s.first_token_s]),
  new Chart("Time between tokens, mean", "s", [""], (s) => [s.gap_s]),
  new Chart("Prompt tokens per second", "", ["all", "cached"], (s) => [s.prompt_per_s, s.cached_per_s]),
];

let tierChart = null; // only where K and V are kept beyond the device

function showTierChart(live) {
  if (!live.tiers || tierChart) return;
  tierChart = new Chart("Restored prompt tokens per second", "", [""], (s) => [s.restored_per_s]);
  charts.push(tierChart);
}

const samples = [];
const before = new Map(); // front end -> its answer before: several share the port, and each counts for itself
let apiKey = "";

function headers() {
  return apiKey ? { Authorization: `Bearer ${apiKey}` } : {};
}

const mean = (now, then) => (now.count > then.count ? (now.sum_s - then.sum_s) / (now.count - then.count) : null);

function take(live) {
  const then = before.get(live.front_end);
  before.set(live.front_end, live);
  const seconds = then ? live.time_s - then.time_s : 0;
  const restarted = then && live.generated_tokens < then.generated_tokens;
  const perSecond = (key) => (seconds > 0 && !restarted ? (live[key] - then[key]) / seconds : null);
  const restored = live.tiers?.restored_tokens ?? null;
  const restoredBefore = then?.tiers?.restored_tokens ?? null;
  const pages = live.pages.held + live.pages.cached + live.pages.free;
  const now = performance.now() / 1000;
  samples.push({
    at: now,
    running: live.running,
    waiting: live.waiting,
    tokens_per_s: perSecond("generated_tokens"),
    prompt_per_s: perSecond("prompt_tokens"),
    cached_per_s: perSecond("cached_tokens"),
    restored_per_s: restored === null || restoredBefore === null || perSecond("generated_tokens") === null ? null : Math.max(0, restored - restoredBefore) / seconds,
    held: pages ? live.pages.held / pages : 0,
    cached: pages ? live.pages.cached / pages : 0,
    first_token_s: then && !restarted ? mean(live.first_token, then.first_token) : null,
    gap_s: then && !restarted ? mean(live.gap, then.gap) : null,
  });
  while (samples.length && samples[0].at < now - SECONDS_SHOWN) samples.shift();
  showTierChart(live);
  charts.forEach((chart) => chart.draw(samples, now));
  showCounts(live);
  showSteps(live);
}

function showList(id, pairs) {
  byId(id).replaceChildren(...pairs.map(([term, text]) => {
    const pair = element("div");
    pair.append(element("dt", term), element("dd", text));
    return pair;
  }));
}

// The shares of the KV cache that groups of layers hold, if there are several.
function heldByGroup(live) {
  const groups = Object.entries(live.held_by_group);
  const pages = live.pages.held + live.pages.cached + live.pages.free;
  return groups.length > 1 ? groups.map(([name, held]) => [`KV cache held: ${name}`, inUnits(pages ? held / pages : 0, "%")]) : [];
}

// How many tokens a step with drafts yields a request, and how often the drafts of each position are accepted; nothing without drafts.
function drafts({ draft_rows: rows, draft_tokens: tokens, accepted_drafts: accepted }) {
  if (!rows) return [];
  const all = accepted.reduce((sum, count) => sum + count, 0);
  return [
    ["drafts checked", tokens.toLocaleString("en")],
    ["drafts accepted", inUnits(all / tokens, "%")],
    ["acceptance length", (1 + all / rows).toFixed(2)],
    ["accepted by position", accepted.map((count) => inUnits(count / rows, "%")).join(", ")],
  ];
}

const inBytes = (value) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = value ? Math.min(units.length - 1, Math.floor(Math.log2(value) / 10)) : 0;
  const scaled = value / 1024 ** power;
  return `${scaled.toFixed(power && scaled < 100 ? 1 : 0)} ${units[power]}`;
};

// What is kept beyond the device, and what came back from there; nothing without a host pool.
function tierCounts({ tiers: all }) {
  if (!all) return [];
  const missed = Object.entries(all.missed).filter(([, count]) => count);
  return [
    ["restored from beyond the GPU", all.restored_tokens.toLocaleString("en")],
    ["host pool", `${inBytes(all.host.used)} of ${inBytes(all.host.limit)}`],
    ["frames damaged, not saved", `${all.damaged.toLocaleString("en")}, ${all.dropped.toLocaleString("en")}`],
    ...missed.map(([reason, count]) => [`prefixes not restored: ${reason}`, count.toLocaleString("en")]),
    ...Object.entries(all.tiers).map(([name, one]) => [
      `tier ${name}`,
      `${inBytes(one.stored)} stored, ${inBytes(one.loaded)} loaded${one.off ? `, ${one.off} times off` : ""}`,
    ]),
  ];
}

function showCounts(live) {
  const number = (value) => value.toLocaleString("en");
  const ended = Object.entries(live.finished).filter(([reason, count]) => count || reason === "stop" || reason === "length");
  showList("counts", [
    ["generated tokens", number(live.generated_tokens)],
    ["prompt tokens", number(live.prompt_tokens)],
    ["found in the prefix cache", number(live.cached_tokens)],
    ...tierCounts(live),
    ["preemptions", number(live.preemptions)],
    ...drafts(live),
    ...heldByGroup(live),
    ...ended.map(([reason, count]) => [`requests ended: ${reason}`, number(count)]),
  ]);
}

const STEP_FIELDS = ["index", "granted", "prefill_tokens", "decode_tokens", "refused", "preempted", "rejected", "waiting"];
let shownSteps = { last: null, frontEnd: null };

// What the scheduler decided in the last steps, the latest first. Another front end may have asked longer ago.
function showSteps({ decisions, front_end: frontEnd }) {
  const steps = decisions?.steps ?? [];
  const last = steps.at(-1)?.index ?? null;
  if (last === null || last === shownSteps.last || (last < shownSteps.last && frontEnd !== shownSteps.frontEnd)) return;
  shownSteps = { last, frontEnd };
  byId("scheduler").textContent = decisions.scheduler;
  byId("steps-note").textContent =
    "How many requests got tokens, how many were refused for lack of budget, sequences or memory: in a few steps each second.";
  byId("steps").tBodies[0].replaceChildren(...steps.toReversed().map((step) => {
    const row = element("tr");
    row.append(...STEP_FIELDS.map((field) => element("td", step[field].toLocaleString("en"), step[field] || field === "index" ? "" : "none")));
    return row;
  }));
}

function showState(text, bad) {
  const state = byId("state");
  if (state.textContent !== text) state.textContent = text; // a screen reader hears of changes only
  state.classList.toggle("bad", bad);
}

let model = null; // its name, and whether it chats
const chosen = new URLSearchParams(location.search).get("model"); // one of several
const ofModel = chosen === null ? "" : `?model=${encodeURIComponent(chosen)}`;

function showModel(live) {
  byId("models").replaceChildren(...live.models.map((name) => new Option(name, name, false, name === live.model)));
  byId("models").hidden = live.models.length < 2;
  model = { name: live.model, chat: live.chat };
  byId("model").textContent = model.name;
  document.title = `${model.name} · Dovetail`;
  byId("prompt-label").textContent = model.chat ? "Message" : "Text to go on from";
}

async function getJson(path) {
  const answer = await fetch(path, { headers: headers() });
  if (!answer.ok) throw await refusal(answer);
  return answer.json();
}

let partsShown = false;

async function showParts() {
  const { version, max_model_len, parts, details } = await getJson(`version${ofModel}`);
  byId("max-tokens").max = max_model_len;
  showList("parts", [["dovetail", version], ...Object.entries({ ...parts, ...details }).map(([name, value]) => [name, String(value)])]);
  partsShown = true;
}

async function refusal(answer) {
  if (answer.status === 401) return new Error("the server asks for an API key: type it below");
  const body = await answer.json().catch(() => null);
  return new Error(body?.error?.message ?? `the server answered ${answer.status}`);
}

async function poll() {
  if (!document.hidden) {
    try {
      const live = await getJson(`page/live${ofModel}`);
      if (!model) showModel(live);
      if (!partsShown) await showParts();
      take(live);
      showState(before.size > 1 ? "up, seen through several front ends: rates are those of one" : "up", false);
    } catch (error) {
      showState(error instanceof TypeError ? "the server doesn't answer" : error.message, true);
    }
  }
  setTimeout(poll, POLL_MS);
}

// Yield the JSON of each event of a stream of server-sent events.
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function requestBody() {
  const common = {
    model: model.name,
    max_tokens: Number(byId("max-tokens").value),
    temperature: Number(byId("temperature").value),
    stream: true,
    stream_options: { include_usage: true },
  };
  const prompt = byId("prompt").value;
  return model.chat ? { ...common, messages: [{ role: "user", content: prompt }] } : { ...common, prompt };
}

function append(text, className = "") {
  const answer = byId("answer");
  const atEnd = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 40;
  let last = answer.lastElementChild;
  if (!last || last.className !== className) answer.append((last = element("span", "", className)));
  last.append(text);
  if (atEnd) answer.scrollTop = answer.scrollHeight;
}

let stopper = null;

function outcome(text, bad = false) {
  byId("outcome").textContent = text;
  byId("outcome").classList.toggle("bad", bad);
}

function busy(isBusy) {
  byId("send").disabled = isBusy;
  byId("stop").disabled = !isBusy;
  byId("answer").setAttribute("aria-busy", String(isBusy));
}

async function ask() {
  if (stopper) return;
  stopper = new AbortController();
  busy(true);
  outcome("the answer is on its way");
  byId("answer").replaceChildren();
  byId("answer").hidden = false;
  const began = performance.now();
  let first = null;
  let reason = null;
  let tokens = 0;
  try {
    if (!model) showModel(await getJson(`page/live${ofModel}`));
    const answer = await fetch(model.chat ? "v1/chat/completions" : "v1/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify(requestBody()),
      signal: stopper.signal,
    });
    if (!answer.ok) throw await refusal(answer);
    for await (const event of eventsOf(answer)) {
      if (event.error) throw new Error(event.error.message);
      tokens = event.usage?.completion_tokens ?? tokens;
      const choice = event.choices?.[0];
      if (!choice) continue;
      reason = choice.finish_reason ?? reason;
      const thought = choice.delta?.reasoning_content ?? choice.delta?.reasoning;
      const text = choice.text ?? choice.delta?.content;
      if ((thought || text) && first === null) first = performance.now();
      if (thought) append(thought, "thought");
      if (text) append(text);
    }
    const seconds = (performance.now() - (first ?? began)) / 1000;
    const speed = tokens > 1 && seconds > 0 ? `, ${inUnits((tokens - 1) / seconds, "")} a second` : "";
    const wait = first === null ? "" : `, the first after ${inUnits((first - began) / 1000, "s")}`;
    outcome(`${tokens} tokens${wait}${speed}; ended by ${reason ?? "the server"}`);
  } catch (error) {
    if (error.name === "AbortError") outcome("stopped");
    else outcome(error instanceof TypeError ? "the connection broke" : error.message, true);
  } finally {
    stopper = null;
    busy(false);
  }
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stopper?.abort();
});
byId("models").addEventListener("change", (event) => {
  location.search = `?model=${encodeURIComponent(event.target.value)}`;
});
byId("stop").addEventListener("click", () => stopper?.abort());
byId("key").addEventListener("input", (event) => {
  apiKey = event.target.value.trim();
});

charts.forEach((chart) => chart.draw([], 0));
poll();
