"use strict";
(() => {
	const $ = id => document.getElementById(id);
	const root = document.documentElement, form = $("filter"), boxes = [...form.outcome];
	root.classList.add("js");

	// What is looked at when something is typed: names, sentences and outcomes, read once.
	const themes = [...document.querySelectorAll(".theme")].map(element => ({
		element, name: element.dataset.name, open: element.open,
		cases: [...element.querySelectorAll(".c")].map(c => {
			const outcomes = [...c.querySelectorAll(":scope > summary > i")].map(i => i.className);
			const name = c.firstChild.firstChild.textContent, title = c.lastChild.firstChild.textContent;
			return {
				element: c, outcomes, text: (name + "\n" + title).toLowerCase(),
				differs: outcomes.includes("d") || new Set(outcomes).size > 1,
			};
		}),
	}));

	const settle = () => {
		const words = $("text").value.toLowerCase().split(/\s+/).filter(Boolean);
		const chosen = new Set(boxes.filter(b => b.checked).map(b => b.value));
		const all = chosen.size === boxes.length, theme = $("theme").value, only = $("only").checked;
		const filtered = words.length > 0 || !all || only || theme !== "";
		let shown = 0;
		for (const t of themes) {
			let n = 0;
			for (const c of t.cases) {
				const ok = (theme === "" || theme === t.name) && (!only || c.differs) &&
					(all || c.outcomes.some(o => chosen.has(o))) && words.every(w => c.text.includes(w));
				c.element.hidden = !ok;
				if (ok) n++;
			}
			t.element.hidden = n === 0;
			t.element.open = filtered || t.open;
			shown += n;
		}
		$("shown").value = shown.toLocaleString("en") + (shown === 1 ? " case" : " cases");
		$("none").hidden = shown > 0;
		remember(words.length ? $("text").value : "", theme, all ? "" : [...chosen].join(""), only);
	};

	// The address holds the filter, so that it can be passed on.
	const remember = (text, theme, outcomes, only) => {
		const p = new URLSearchParams();
		if (text) p.set("text", text);
		if (theme) p.set("theme", theme);
		if (outcomes || !boxes.some(b => b.checked)) p.set("outcomes", outcomes);
		if (only) p.set("only", "differences");
		const hash = p.toString();
		if (hash !== location.hash.slice(1)) history.replaceState(null, "", hash ? "#" + hash : location.pathname + location.search);
	};
	const recall = () => {
		const p = new URLSearchParams(location.hash.slice(1));
		$("text").value = p.get("text") || "";
		$("theme").value = p.get("theme") || "";
		for (const b of boxes) b.checked = !p.has("outcomes") || p.get("outcomes").includes(b.value);
		$("only").checked = p.has("only");
		settle();
	};

	form.addEventListener("input", settle);
	form.addEventListener("submit", e => e.preventDefault());
	addEventListener("hashchange", recall);
	for (const [id, open] of [["open", true], ["close", false]]) {
		$(id).addEventListener("click", () => {
			for (const t of themes) {
				t.element.open = t.open = open;
				if (!open) for (const c of t.cases) c.element.open = false;
			}
		});
	}
	for (const t of themes) {
		t.element.firstElementChild.addEventListener("click", () => { t.open = !t.element.open; });
	}
	// Objects and listings are put in their places when they are asked for.
	document.addEventListener("toggle", e => {
		const d = e.target;
		if (d.open && d.dataset.text && d.childElementCount === 1) {
			const pre = $(d.dataset.text).cloneNode(true);
			pre.removeAttribute("id");
			d.append(pre);
		}
	}, true);
	if (location.hash.length > 1) recall();
})();
