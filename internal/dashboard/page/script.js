"use strict";
// All that comes from the nodes is put in as text, never as markup.
const token = new URLSearchParams(location.search).get("token") || "";
const $ = (id) => document.getElementById(id);
const history = []; // connections per second, the last two minutes
let view = null, filter = "", selected = "", opened = new Map();

function cell(label, value, cls) {
  const td = document.createElement("td");
  td.dataset.label = label;
  td.textContent = value;
  if (cls) td.className = cls;
  return td;
}

function row(cells, cls) {
  const tr = document.createElement("tr");
  tr.append(...cells);
  if (cls) tr.className = cls;
  return tr;
}

function fill(id, rows, empty) {
  if (rows.length === 0) {
    const td = cell("", empty);
    td.colSpan = 9;
    rows = [row([td], "empty")];
  }
  $(id).tBodies[0].replaceChildren(...rows);
}

const time = (text) => new Date(text).toLocaleTimeString([], { hour12: false });
const took = (s) => (s === 0 ? "0 s" : s < 1 ? (s * 1000).toFixed(s < 0.01 ? 2 : 0) + " ms" : s.toFixed(1) + " s");
const rate = (r) => (r >= 100 ? r.toFixed(0) : r.toFixed(1));

function driftOf(s) {
  const d = s.drift;
  if (!d.checked) return ["not checked yet", "warn"];
  if (d.error) return ["check failed: " + d.error, "bad"];
  if (!d.foundAt) return ["none", ""];
  const text = `${d.found} found, last at ${time(d.foundAt)}: ${(d.last || []).join("; ")}`;
  return d.repaired && d.repaired >= d.foundAt ? [text + ", repaired", "warn"] : [text, "bad"];
}

function inOrder(n) {
  const s = n.status;
  const open = s && s.drift.foundAt && !(s.drift.repaired && s.drift.repaired >= s.drift.foundAt);
  return s && s.firstProgrammed && !s.failing && s.quarantined.count === 0 && !open;
}

function drawNodes(report) {
  fill("nodes", report.nodes.map((n) => {
    if (!n.status) {
      const td = cell("", n.error, "bad");
      td.colSpan = 7;
      return row([cell("Node", n.node), td], "bad");
    }
    const s = n.status, [drift, cls] = driftOf(s);
    const lag = s.failing ? "failing: " + s.failing.error : took(s.pending.lagSeconds);
    return row([cell("Node", n.node), cell("Version", s.version), cell("Backend", s.backend),
      cell("Services", s.services, "n"), cell("Lag", lag, "n" + (s.failing || s.pending.lagSeconds > 2 ? " bad" : "")),
      cell("Quarantined", s.quarantined.count, "n" + (s.quarantined.count ? " bad" : "")),
      cell("Ejected", s.ejected.count, "n" + (s.ejected.count ? " warn" : "")), cell("Drift", drift, cls)]);
  }), "no nodes");
  const lines = (report.differences || []).map((d) => {
    const p = document.createElement("p");
    p.className = "bad";
    p.textContent = `${d.service} differs since ${time(d.since)}: ${d.nodes.join(", ")}` +
      (d.behind ? " (behind the others)" : "");
    return p;
  });
  for (const note of report.notes || []) {
    const p = document.createElement("p");
    p.className = "dim";
    p.textContent = note;
    lines.push(p);
  }
  $("differences").replaceChildren(...lines);
}

const nameOf = (p) => (p.port ? p.service + ":" + p.port : p.service);
const shown = () => (view ? view.ports.filter((p) => nameOf(p).includes(filter)) : []);

function drawServices() {
  const rows = [];
  for (const p of shown()) {
    const name = nameOf(p);
    const tr = row([cell("Service", name), cell("Connections/s", rate(p.rate), "n"), cell("Nodes", p.nodes, "n")]);
    tr.dataset.name = name;
    tr.setAttribute("aria-selected", name === selected);
    rows.push(tr);
    for (const e of opened.get(name) || []) {
      const at = e.text || (e.address.includes(":") ? `[${e.address}]:${e.port}` : `${e.address}:${e.port}`);
      rows.push(row([cell("Endpoint", at, e.text ? "dim" : ""), cell("Connections/s", e.text ? "" : rate(e.rate), "n"),
        cell("Nodes", e.text ? "" : e.nodes, "n")], "endpoint"));
    }
  }
  fill("services", rows, filter ? "no Service has this in its name" : "no Service is programmed");
  const more = view ? view.portCount - view.ports.length : 0;
  $("services-more").textContent = more > 0 ? `and ${more} with fewer connections` : "";
}

function drawBad(report) {
  const rows = [];
  for (const n of report.nodes) {
    if (!n.status) continue;
    for (const q of n.status.quarantined.services || []) {
      rows.push(row([cell("What", q.service, "bad"), cell("Node", n.node, "t"), cell("Since", time(q.since), "t"),
        cell("Why", q.error)]));
    }
    for (const e of n.status.ejected.endpoints || []) {
      rows.push(row([cell("What", `${e.endpoint} of ${e.service}`, "warn"), cell("Node", n.node, "t"),
        cell("Since", time(e.since), "t"), cell("Why", e.cause)]));
    }
  }
  fill("bad", rows, "none");
}

function drawChanges() {
  fill("changes", view.changes.map((c) => {
    const more = c.count - (c.services || []).length;
    const services = (c.services || []).join(", ") + (more > 0 ? ` and ${more} more` : "");
    return row([cell("At", time(c.at), "t"), cell("Node", c.node, "t"), cell("Services", services || "–"),
      cell("Elements", `+${c.added} ~${c.replaced} −${c.removed}`, "n"), cell("Took", took(c.seconds), "n")]);
  }), "no change since the proxies started");
}

function figure(id, text, bad) {
  $(id).textContent = text;
  $(id).parentElement.classList.toggle("bad", !!bad);
}

function drawFigures(report) {
  const nodes = report.nodes, good = nodes.filter(inOrder).length;
  const sum = (f) => nodes.reduce((n, x) => n + (x.status ? f(x.status) : 0), 0);
  const differ = report.differ;
  figure("f-nodes", `${good} of ${nodes.length}`, good < nodes.length || differ > 0);
  figure("f-lag", took(Math.max(0, ...nodes.map((n) => (n.status ? n.status.pending.lagSeconds : 0)))));
  figure("f-quarantined", sum((s) => s.quarantined.count), sum((s) => s.quarantined.count) > 0);
  figure("f-ejected", sum((s) => s.ejected.count), sum((s) => s.ejected.count) > 0);
  figure("f-rate", rate(view.rate));
  history.push(view.rate);
  if (history.length > 60) history.shift();
  const top = Math.max(...history, 1);
  $("line").firstElementChild.setAttribute("d",
    history.map((r, i) => `${i ? "L" : "M"}${120 - (history.length - 1 - i) * 2} ${26 - (24 * r) / top}`).join(" "));
}

function draw(v) {
  view = v;
  const trouble = [v.error, v.topError].filter(Boolean).join("; ");
  $("trouble").hidden = !trouble;
  $("trouble").textContent = trouble;
  if (v.report) {
    drawFigures(v.report);
    drawNodes(v.report);
    drawBad(v.report);
  }
  drawServices();
  drawChanges();
  $("state").textContent = `live, ${time(v.time)}, asked for ${took(v.seconds)}`;
  $("state").className = "live";
}

function ask(path, params) {
  return fetch(path + "?" + new URLSearchParams(params), { headers: { "X-Token": token } }).then(async (r) => {
    const text = await r.text();
    if (!r.ok) throw new Error(text.trim());
    return text;
  });
}

function toggle(name) {
  selected = name;
  if (opened.delete(name)) return drawServices();
  opened.set(name, [{ text: "asking the nodes" }]);
  drawServices();
  ask("service", { service: name }).then((text) => {
    const ports = JSON.parse(text).filter((p) => nameOf(p) === name);
    const list = ports.flatMap((p) => p.endpoints || []);
    if (opened.has(name)) opened.set(name, list.length ? list : [{ text: "no endpoint" }]);
  }, (err) => opened.set(name, [{ text: err.message }])).finally(drawServices);
}

function move(by) {
  const names = shown().map(nameOf);
  if (!names.length) return;
  const at = names.indexOf(selected);
  selected = names[Math.min(Math.max(at + by, 0), names.length - 1)];
  drawServices();
  document.querySelector("[aria-selected=true]").scrollIntoView({ block: "nearest" });
}

$("services").addEventListener("click", (e) => {
  const tr = e.target.closest("tr[data-name]");
  if (tr) toggle(tr.dataset.name);
});
$("filter").addEventListener("input", (e) => { filter = e.target.value.trim(); drawServices(); });
$("help").addEventListener("click", () => $("keys").showModal());
$("explain").addEventListener("submit", (e) => {
  e.preventDefault();
  const form = new FormData(e.target), answer = $("answer");
  answer.hidden = false;
  answer.className = "";
  answer.textContent = "asking the node";
  ask("explain", { pod: form.get("pod"), service: form.get("service") }).then(
    (text) => { answer.textContent = text; },
    (err) => { answer.className = "bad"; answer.textContent = err.message; });
});
document.addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey || $("keys").open) return;
  if (e.target.matches("input")) {
    if (e.key === "Escape") e.target.blur();
    return;
  }
  const keys = {
    "/": () => $("filter").focus(), "e": () => $("explain").pod.focus(), "?": () => $("keys").showModal(),
    "j": () => move(1), "k": () => move(-1), "Enter": () => { if (selected) toggle(selected); },
    "t": () => {
      const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = (root.dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
    },
  };
  if (keys[e.key] && !e.target.matches("button, pre")) {
    e.preventDefault();
    keys[e.key]();
  }
});

const views = new EventSource("views?" + new URLSearchParams({ token }));
views.onmessage = (e) => draw(JSON.parse(e.data));
views.onerror = () => {
  $("state").textContent = token ? "connection lost, trying again" :
    "the token is missing: open the address that kubectl verdict dashboard printed";
  $("state").className = "lost";
};
