// Search, filters and order of the list. Without this the page shows every paper and its
// links lead to ready-made lists. The state lives in the address, so a view can be linked.
"use strict";
(() => {
  const form = document.querySelector("[data-find]");
  const list = document.querySelector("[data-papers]");
  if (!form || !list) return;
  const told = document.querySelector("[data-told]");
  const none = document.querySelector("[data-none]");
  const papers = [...list.children];
  const total = papers.length;
  const first = new Map(papers.map((paper, place) => [paper, place]));
  const KINDS = ["status", "room", "evidence"];
  const ORDERS = {
    new: (a, b) => first.get(a) - first.get(b),
    id: (a, b) => a.dataset.id - b.dataset.id,
    name: (a, b) => a.dataset.name.localeCompare(b.dataset.name),
    year: (a, b) => b.dataset.year - a.dataset.year || first.get(a) - first.get(b),
  };
  let order = "new";

  function value(name) {
    const field = form.elements[name];
    return field ? field.value : "";
  }

  function show() {
    const words = value("q").toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = KINDS.map((kind) => [kind, value(kind)]).filter(([, v]) => v);
    let seen = 0;
    for (const paper of papers) {
      const fits =
        wanted.every(([kind, v]) => paper.dataset[kind] === v) &&
        words.every((word) => paper.dataset.words.includes(word));
      paper.hidden = !fits;
      seen += fits;
    }
    if (value("sort") !== order) {
      order = value("sort");
      list.append(...papers.sort(ORDERS[order] || ORDERS.new));
    }
    told.textContent = `${seen} of ${total} papers`;
    none.hidden = seen > 0;
    for (const link of document.querySelectorAll(".tally a[data-kind]")) {
      if (!form.elements.status) continue;
      if (link.dataset.value === value("status")) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  }

  function keep() {
    const state = new URLSearchParams();
    for (const name of ["q", ...KINDS, "sort"]) {
      const v = value(name);
      if (v && !(name === "sort" && v === "new")) state.set(name, v);
    }
    const hash = state.toString();
    history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
  }

  function restore() {
    if (!location.hash.includes("=")) return; // an anchor of the page
    const state = new URLSearchParams(location.hash.slice(1));
    for (const name of ["q", ...KINDS, "sort"]) {
      const field = form.elements[name];
      if (!field) continue;
      field.value = state.get(name) || (name === "sort" ? "new" : "");
      if (field.selectedIndex === -1) field.selectedIndex = 0; // no such choice
    }
  }

  const changed = () => {
    show();
    keep();
  };
  form.addEventListener("input", changed);
  form.addEventListener("change", changed);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(changed));
  window.addEventListener("hashchange", () => {
    restore();
    show();
  });
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-kind]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
    const field = form.elements[link.dataset.kind];
    const known = field && [...field.options].some((option) => option.value === link.dataset.value);
    if (!known) return; // the ready-made list says that there is none
    event.preventDefault();
    field.value = field.value === link.dataset.value ? "" : link.dataset.value;
    changed();
    told.scrollIntoView({ block: "center" });
  });
  form.hidden = false;
  restore();
  show();
})();
