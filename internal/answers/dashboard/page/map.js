"use strict";
// The service map: clients on the left, Services on the right, arrows as thick as bytes. Of many, the largest and those
// that fail have rows of their own; the others are folded by namespace.
const most = { largest: 14, failing: 10, groups: 6, opened: 40, arrows: 100 };
const rowHeight = 24, mapEvery = 15000;
let chart = { arrows: [] }, items = [], picked = null, focused = "";
const openedGroup = { client: "", service: "" }, allGroups = { client: false, service: false };

const volume = (n) => {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  for (; n >= 1000 && i < units.length - 1; i++) n /= 1000;
  return `${n.toFixed(i && n < 100 ? 1 : 0)} ${units[i]}`;
};
const thickness = (bytes) => Math.min(16, Math.max(1, 1 + 2.2 * (Math.log10(Math.max(bytes, 1)) - 5)));
const share = (a) => {
  const percent = (100 * a.failures) / a.connections;
  return (percent < 1 ? "<1" : percent.toFixed(0)) + " %";
};
const namespaceOf = (name) => (/^[^/:]+\//.test(name) && !/^[\d.]+\/\d+$/.test(name) ? name.split("/")[0] : "");
const isGroup = (name) => name.endsWith("/") || name === "*";
const size = (a) => a.sent + a.received;
const bySize = (a, b) => size(b) - size(a) || (a.name < b.name ? -1 : 1);

function total(name, parts) {
  const sum = { name, sent: 0, received: 0, connections: 0, failures: 0 };
  for (const p of parts) for (const k of ["sent", "received", "connections", "failures"]) sum[k] += p[k];
  return sum;
}

function grouped(list, key) {
  const out = new Map();
  for (const a of list) {
    const k = key(a), of = out.get(k);
    if (of) of.push(a);
    else out.set(k, [a]);
  }
  return out;
}

// rowsOf gives the rows of one side, and by each name the row that it is in.
function rowsOf(kind, arrows, key) {
  const all = [...grouped(arrows, key)].map(([name, of]) => ({ kind, ...total(name, of),
    count: isGroup(name) ? of.reduce((n, a) => n + a.folded, 0) : 1 })).sort(bySize);
  const own = all.filter((r) => !isGroup(r.name)), rows = own.slice(0, most.largest), at = new Map();
  rows.push(...own.slice(most.largest).filter((r) => r.failures).sort((a, b) => b.failures - a.failures)
    .slice(0, most.failing));
  const kept = new Set(rows);
  const groups = [...grouped(all.filter((r) => !kept.has(r)), (r) => namespaceOf(r.name) + "/")].map(([name, of]) =>
    (of.length === 1 && !isGroup(of[0].name) ? of[0] : { kind, ...total(name, of), of }));
  groups.sort((a, b) => (b.name === openedGroup[kind]) - (a.name === openedGroup[kind]) || bySize(a, b));
  const seen = groups.splice(0, allGroups[kind] ? most.opened : most.groups);
  if (groups.length || allGroups[kind]) {
    seen.push({ kind, ...total("*", groups), of: groups.flatMap((g) => g.of || [g]), namespaces: groups.length });
  }
  for (const g of seen) {
    rows.push(g);
    if (g.of && g.name === openedGroup[kind]) {
      const inside = g.of.filter((r) => !isGroup(r.name)).slice(0, most.opened);
      rows.push(...inside.map((r) => Object.assign(r, { inside: true })));
      g.of = g.of.filter((r) => !inside.includes(r));
      Object.assign(g, total(g.name, g.of), { open: true });
    }
  }
  for (const r of rows) for (const part of r.of || [r]) at.set(part.name, r);
  return { rows, at };
}

function labelOf(r) {
  if (!r.of) return r.name || "unknown";
  const n = r.of.reduce((sum, p) => sum + p.count, 0), up = r.of.some((p) => isGroup(p.name)) ? "up to " : "";
  const others = n ? `${up}${n} other${n === 1 ? "" : "s"}` : "all";
  if (r.name === "*") return r.namespaces ? `${others} of ${plural(r.namespaces, "namespace")}` : "fewer namespaces";
  return others + (r.name === "/" ? "" : " of " + r.name.slice(0, -1));
}

const figures = (a) => `sent ${volume(a.sent)}, received ${volume(a.received)}, ` +
  plural(a.connections, "connection") + " ended" + (a.failures ? `, ${a.failures} failed (${share(a)})` : "");

function shape(tag, attributes, ...children) {
  const e = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
  e.append(...children);
  return e;
}

function clipped(text, room) {
  const n = Math.max(Math.floor(room / 7.4), 5), half = Math.floor(n / 2);
  return text.length <= n ? text : text.slice(0, n - half - 1) + "…" + text.slice(text.length - half);
}

function item(kind, key, says, data, cls, ...children) {
  const el = shape("g", { class: cls, tabindex: -1, role: "button", "aria-label": says }, ...children,
    shape("title", {}, says));
  el.dataset.item = items.length;
  items.push({ kind, key, el, ...data });
  return el;
}

function drawRow(kind, r, i, width, room) {
  const left = kind === "client", y = i * rowHeight + rowHeight / 2, x = left ? 0 : width - room;
  const port = !left && view && view.ports.find((p) => p.service === r.name && p.for), name = labelOf(r) + forOf(port);
  r.y = y;
  const open = r.open || (r.name === "*" && allGroups[kind]);
  const mark = (r.of ? (open ? "▾ " : "▸ ") : "") + (r.failures ? "✕ " : ""), bytes = room > 200 ? volume(size(r)) : "";
  const says = clipped(mark + name, room - 20 - 7 * bytes.length);
  const texts = [shape("text", { x: x + (left ? 2 : 12), y: y + 4 }, says)];
  if (bytes) texts.push(shape("text", { x: x + room - (left ? 12 : 2), y: y + 4, class: "bytes" }, bytes));
  return item(kind, kind + " " + r.name, `${left ? "client" : "Service"} ${name}: ${figures(r)}`, { row: r },
    `who${r.failures ? " bad" : ""}`, shape("rect", { x, y: y - rowHeight / 2, width: room, height: rowHeight, rx: 4 }),
    ...texts);
}

function drawArrow(a, width, room, i) {
  const x1 = room + 4, x2 = width - x1, w = thickness(size(a)), head = Math.max(7, w * 0.9), end = x2 - head;
  const y1 = a.from.y, y2 = a.to.y, middle = (x1 + end) / 2, d = `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${end} ${y2}`;
  const parts = [shape("path", { d, class: "hit" }), shape("path", { d, "stroke-width": w }),
    shape("path", { d: `M${x2} ${y2}l${-head} ${-head * 0.6}v${head * 1.2}z`, class: "head" })];
  if (a.failures) { // not all at one place of their arrows
    const at = parts[1].getPointAtLength(parts[1].getTotalLength() * (0.3 + 0.1 * (i % 5)));
    parts.push(shape("text", { x: at.x, y: at.y + 4 }, `✕ ${share(a)}`));
  }
  return item("arrow", a.name, `${labelOf(a.from)} to ${labelOf(a.to)}: ${figures(a)}`, { arrow: a },
    `arrow${a.failures ? " bad" : ""}${a.from.of || a.to.of ? " many" : ""}`, ...parts);
}

// touches reports whether an item belongs to what is picked.
function touches(it) {
  if (!picked || it.key === picked.key) return true;
  const [a, r] = it.arrow ? [it.arrow, picked.row] : [picked.arrow, it.row];
  return !!a && !!r && (a.from === r || a.to === r);
}

// arrowsOf adds up the arrows between rows, and gives those to draw: the largest, those that fail, and those of what is
// picked.
function arrowsOf(by, clients, services) {
  const ends = (a) => ({ from: clients.at.get(a[by] || ""), to: services.at.get(a.service) });
  const keyOf = (a) => `arrow ${ends(a).from.name} ${ends(a).to.name}`;
  const all = [...grouped(chart.arrows, keyOf)].map(([key, of]) => ({ ...total(key, of), ...ends(of[0]) }));
  all.sort(bySize);
  let failing = 0;
  const drawn = all.filter((a, i) => i < most.arrows || (a.failures && failing++ < most.arrows) ||
    ((a.from.inside || a.to.inside) && i < 5 * most.arrows) ||
    (picked && [a.name, "client " + a.from.name, "service " + a.to.name].includes(picked.key)));
  return { drawn, hidden: all.length - drawn.length };
}

function drawMap() {
  const by = $("map-by").value, clients = rowsOf("client", chart.arrows, (a) => a[by] || "");
  const services = rowsOf("service", chart.arrows, (a) => a.service);
  const width = Math.max($("map").parentElement.clientWidth - 26, 240), room = Math.min(320, width * 0.38);
  const height = Math.max(clients.rows.length, services.rows.length) * rowHeight;
  items = [];
  const rows = [...clients.rows.map((r, i) => drawRow("client", r, i, width, room)),
    ...services.rows.map((r, i) => drawRow("service", r, i, width, room))];
  const { drawn, hidden } = arrowsOf(by, clients, services), arrows = drawn.map((a, i) => drawArrow(a, width, room, i));
  picked = items.find((it) => picked && it.key === picked.key) || null;
  for (const it of items) it.el.classList.toggle("faint", !touches(it));
  const map = $("map"), had = map.contains(document.activeElement);
  for (const [k, v] of Object.entries({ width, height })) map.setAttribute(k, v);
  map.replaceChildren(...arrows, ...rows);
  const now = items.find((it) => it.key === focused) || items[0];
  if (now) now.el.setAttribute("tabindex", 0);
  if (now && had) now.el.focus();
  sayMap(hidden);
  $("map-detail").hidden = !picked;
}

// sayMap says what the map does not show.
function sayMap(hidden) {
  const c = chart, notes = [], lost = [], losses = c.losses || {};
  const span = { "5m": 300, "15m": 900, "1h": 3600 }[$("map-since").value];
  const say = (when, text) => { if (when) notes.push(text()); };
  const off = c.nodes - c.recording - (c.failed || 0);
  say(off && !c.recording, () => "Records are off: records: on in the proxies' configuration, or --records=on, switches " +
    "them on (docs/FLOWS.md).");
  say(off && c.recording, () => `${off} of ${plural(c.nodes, "node")} keep no records.`);
  say(c.recording && !c.arrows.length, () => "No connection to a Service was recorded in this time.");
  say(c.recording && Date.now() - new Date(c.started) < span * 1000, () => `All nodes record since ${time(c.started)} only.`);
  say(hidden, () => plural(hidden, "thinner arrow") + " not drawn: choose a client or a Service to see all of its own.");
  if (losses.events) lost.push(plural(losses.events, "end") + " of connections");
  if (losses.refusals) lost.push(plural(losses.refusals, "refusal"));
  say(lost.length, () => `Missing since the records began: ${lost.join(" and ")}, for which the kernel of ` +
    plural(c.lossy, "node") + " had no room.");
  say(c.left, () => plural(c.left, "sum") + " of the oldest minutes did not fit: choose a shorter time.");
  say(losses.sampled, () => plural(losses.sampled, "record") + " left out of the lists of failures, not of the sums.");
  $("map-note").textContent = notes.join(" ");
  $("map-error").textContent = c.error || "";
}

function drawLegend() {
  const lines = [[1e5, "100 kB"], [1e7, "10 MB"], [1e9, "1 GB"], [0, "✕ share of connections that failed"]];
  $("map-legend").replaceChildren(...lines.map(([bytes, text]) => {
    const line = shape("svg", { width: 34, height: 14, class: bytes ? "" : "bad", "aria-hidden": true },
      shape("path", { d: "M0 7H34", "stroke-width": thickness(bytes || 1e6) }));
    const span = document.createElement("span");
    span.append(line, " " + text);
    return span;
  }));
}

// choose opens or closes a group. Of others it shows figures, and of arrows and Services the last failures.
function choose(it) {
  const r = it.row;
  if (r && r.of) {
    if (r.name === "*") allGroups[it.kind] = !allGroups[it.kind];
    else openedGroup[it.kind] = r.open ? "" : r.name;
    return drawMap();
  }
  picked = picked && picked.key === it.key ? null : it;
  drawMap();
  if (picked) showDetail();
}

function showDetail() {
  const { key, kind, row: r, arrow: a } = picked, to = a ? a.to : r, by = $("map-by").value;
  $("map-title").textContent = a ? `${labelOf(a.from)} → ${labelOf(to)}` : labelOf(r);
  const say = (text) => { $("map-sum").textContent = [figures(a || r), text].filter(Boolean).join("; "); };
  const list = (found, empty) => fill("failures", found.map((f) => row([cell("Time", time(f.time), "t"),
    cell("Client", who(f.client)), cell("Endpoint", who(f.endpoint || {})), cell("End", f.end, "bad"),
    cell("Reason", f.reason || "", "why")])), empty);
  $("failures").hidden = kind === "client" || !!to.of;
  say($("failures").hidden ? "choose one Service, or an arrow to it, for the last failures" : "");
  if ($("failures").hidden) return;
  const asked = { since: $("map-since").value, service: to.name };
  if (a && (by === "zone" || !["*", "others"].includes(a.from.name))) asked[by] = a.from.name;
  list([], "asking the nodes");
  ask("failures", asked).then(JSON.parse, (err) => ({ records: [], error: err.message })).then((f) => {
    if (!picked || picked.key !== key) return;
    list(f.records, "no connection failed in this time");
    say(f.error);
  });
}

const who = (p) => (p.pod ? `${p.pod} (${p.address})` : p.prefix || p.address || "none");

function refreshMap() {
  ask("map", { since: $("map-since").value }).then(JSON.parse, (err) => ({ ...chart, error: err.message })).then((got) => {
    chart = { arrows: [], ...got };
    drawMap();
  });
}

// step moves the focus: up and down among the same, left and right from clients to arrows to Services.
function step(it, key) {
  const same = items.filter((o) => o.kind === it.kind), right = key === "ArrowRight";
  if (key === "ArrowUp" || key === "ArrowDown") return same[same.indexOf(it) + (key === "ArrowUp" ? -1 : 1)];
  if (it.arrow) return items.find((o) => o.row === (right ? it.arrow.to : it.arrow.from));
  if (right !== (it.kind === "client")) return null;
  return items.find((o) => o.arrow && (right ? o.arrow.from : o.arrow.to) === it.row);
}

const itemAt = (e) => items[e.target.closest("[data-item]")?.dataset.item];
$("map").addEventListener("click", (e) => { const it = itemAt(e); if (it) { focused = it.key; choose(it); } });
$("map").addEventListener("focusin", (e) => {
  const it = itemAt(e);
  if (!it) return;
  for (const o of items) o.el.setAttribute("tabindex", o === it ? 0 : -1);
  focused = it.key;
});
$("map").addEventListener("keydown", (e) => {
  const it = itemAt(e), to = it && e.key.startsWith("Arrow") ? step(it, e.key) : null;
  if (to) to.el.focus();
  else if (it && (e.key === "Enter" || e.key === " ")) choose(it);
  else if (e.key === "Escape" && picked) choose(picked);
  else return;
  e.preventDefault();
  e.stopPropagation();
});
$("map-by").addEventListener("change", () => { picked = null; drawMap(); });
$("map-since").addEventListener("change", () => { refreshMap(); if (picked) showDetail(); });
addEventListener("resize", drawMap);
drawLegend();
setInterval(() => { if (!document.hidden) refreshMap(); }, mapEvery);
refreshMap();
