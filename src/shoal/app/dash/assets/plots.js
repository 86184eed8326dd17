// Draws the charts of a page with uPlot, from the values at the address of each
// [data-plots]: values under the pointer, zoom, smoothing, and lines that can be hidden.
"use strict";
(() => {
  const HEIGHT = 220;
  // Most part of a smoothed value that comes from the ones before it.
  const SMOOTHEST = 0.99;
  const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

  const INTEGERS = Array.from({ length: 45 }, (_, number) => [1, 2, 5][number % 3] * 10 ** Math.floor(number / 3));

  // Counts are labelled at whole numbers.
  function whole(columns) {
    return columns.every((values) => values.every((value) => value == null || Number.isInteger(value)));
  }

  function make(tag, fields = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(fields)) {
      if (name in node) node[name] = value;
      else node.setAttribute(name, value);
    }
    node.append(...children);
    return node;
  }

  // Colours are those of the style sheet; an element that has one tells what it is now.
  const probe = make("span", { hidden: true });
  document.body.append(probe);
  function colour(name, share = 1) {
    probe.className = name;
    const solid = getComputedStyle(probe).color;
    return share === 1 ? solid : solid.replace("rgb(", "rgba(").replace(")", `, ${share})`);
  }

  // Numbers

  function exact(value) {
    if (value == null) return "–";
    const size = Math.abs(value);
    if ((size !== 0 && size < 1e-3) || size >= 1e15) return value.toExponential(3);
    const [unit, letter] = (size >= 1e7 && UNITS.find(([least]) => size >= least)) || [1, ""];
    if (letter) return Number((value / unit).toPrecision(5)) + letter;
    return value.toLocaleString("en", { maximumSignificantDigits: 5 });
  }

  // Labels of an axis: one unit, and as many digits as tell them apart.
  function spelled(values) {
    const given = values.filter((value) => value != null);
    const top = Math.max(0, ...given.map(Math.abs));
    if (top > 0 && top < 1e-3) {
      return values.map((value) => value == null ? null : value === 0 ? "0"
        : String(Number(value.toPrecision(3)).toExponential()));
    }
    const [unit, letter] = UNITS.find(([size]) => top >= 10 * size) ?? [1, ""];
    let digits = 0;
    const whole = (value) => {
      const scaled = (value / unit) * 10 ** digits;
      return Math.abs(scaled - Math.round(scaled)) < 1e-6 * Math.max(1, Math.abs(scaled));
    };
    while (digits < 6 && !given.every(whole)) digits += 1;
    return values.map((value) => value == null ? null
      : value === 0 ? "0" : (value / unit).toFixed(digits) + letter);
  }

  // Labels of a logarithmic axis, each with a unit of its own.
  function decades(values) {
    return values.map((value) => {
      if (value == null) return null;
      const [unit, letter] = UNITS.find(([size]) => value >= size) ?? [1, ""];
      return value < 1e-3 ? value.toExponential() : String(Number((value / unit).toPrecision(3))) + letter;
    });
  }

  // Places of labels on a logarithmic axis: powers of ten, and between them where there is room.
  function marks(low, high) {
    const span = high / low;
    if (span < 4) {
      const rough = (high - low) / 4;
      const size = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map((times) => times * size).find((one) => one >= rough);
      const first = Math.ceil(low / step);
      return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, number) => (first + number) * step);
    }
    const decade = Math.max(1, Math.ceil(Math.log10(span) / 6));
    const between = span < 1e3 ? [1, 2, 5] : [1];
    const places = [];
    for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += decade) {
      places.push(...between.map((times) => times * 10 ** power));
    }
    return places.filter((place) => place >= low && place <= high);
  }

  // The mean of what came before, the older the less it counts.
  function smoothed(values, part) {
    let sum = 0;
    let weight = 0;
    return values.map((value) => {
      if (value == null) return null;
      sum = part * sum + (1 - part) * value;
      weight = part * weight + (1 - part);
      return sum / weight;
    });
  }

  // The value at a place, or the nearest one of a line that has none there.
  function near(values, index) {
    for (let far = 0; far < values.length; far += 1) {
      const value = values[index - far] ?? values[index + far];
      if (value != null) return value;
    }
    return null;
  }

  // One chart. The view is shared by the charts that have one horizontal axis.
  class Plot {
    constructor(grid, view, given) {
      this.view = view;
      this.host = make("div", { className: "plot-host", tabIndex: 0, role: "group" });
      this.legend = make("ul", { className: "plot-legend" });
      this.said = make("p", { className: "unseen", role: "status" });
      this.empty = make("p", { className: "soft", textContent: "Nothing to draw yet." });
      this.heading = make("b");
      this.unit = make("span", { className: "soft" });
      this.figure = make("figure", { className: "card plot" },
        make("figcaption", {}, this.heading, " ", this.unit),
        this.empty, this.host, this.legend, this.said);
      grid.append(this.figure); // its width is known from here on
      this.host.addEventListener("keydown", (event) => this.key(event));
      new ResizeObserver(() => this.fit()).observe(this.figure);
      this.take(given);
    }

    // Same lines in other values, or other lines.
    take(given) {
      const shape = (plot) => JSON.stringify([
        plot.title, plot.log, plot.bands.length, plot.series.map((line) => [line.name, line.points]),
      ]);
      const same = this.chart && shape(given) === shape(this.given);
      this.given = given;
      // All there is, also while a part of it was fetched.
      if (!this.view.zoom) this.ends = [given.at[0], given.at.at(-1)];
      this.heading.textContent = given.title;
      this.unit.textContent = given.y;
      this.host.setAttribute("aria-label", `${given.description} `
        + "Arrow keys go from value to value, + and - zoom, 0 shows all.");
      const some = given.series.some((line) => line.values.some((value) => value != null));
      this.empty.hidden = some;
      this.host.hidden = this.legend.hidden = !some;
      if (!some) return this.drop();
      if (!same) {
        this.drop();
        this.build();
      } else {
        this.draw();
      }
    }

    drop() {
      this.chart?.destroy();
      this.chart = null;
    }

    // Columns of uPlot: places, ends of bands, lines, and the same smoothed.
    columns() {
      const { at, series, bands } = this.given;
      const part = this.view.smoothing;
      return [
        at,
        ...bands.flatMap((band) => [band.high, band.low]),
        ...series.map((line) => line.values),
        ...series.map((line) => this.smooth(line) ? smoothed(line.values, part) : at.map(() => null)),
      ];
    }

    smooth(line) {
      return this.view.smoothing > 0 && line.line && !line.points && !line.dashed;
    }

    draw() {
      this.given.series.forEach((line, index) => {
        const drawn = this.chart.series[this.base + index];
        drawn.alpha = this.smooth(line) ? 0.25 : 1;
      });
      this.chart.setData(this.columns(), true);
      this.read(this.chart.cursor.idx);
    }

    build() {
      const { series, bands, log } = this.given;
      const lines = series.map((line) => this.line(line, line.points));
      const smooth = series.map((line) => this.line(line, false));
      const edges = bands.flatMap(() => [0, 1].map(() => ({
        stroke: "transparent", width: 0, points: { show: false }, spanGaps: true,
      })));
      this.base = 1 + edges.length;
      this.buttons = series.map((line, index) => {
        const button = make("button", { type: "button", ariaPressed: "true" },
          make("span", { className: `plot-mark plot-${line.colour}` + (line.dashed ? " plot-dashed" : "") }),
          line.name);
        button.addEventListener("click", () => this.toggle(index));
        return button;
      });
      this.values = series.map(() => make("span", { className: "plot-value" }));
      this.place = make("li", { className: "plot-place soft" });
      this.legend.replaceChildren(
        ...series.map((_, index) => make("li", {}, this.buttons[index], " ", this.values[index])),
        this.place,
      );
      const axis = (side, extra) => ({
        stroke: () => colour("plot-ink"),
        font: "12px system-ui, sans-serif",
        grid: { stroke: () => colour("plot-line"), width: 1 },
        ticks: { stroke: () => colour("plot-line"), width: 1, size: 4 },
        gap: 4,
        values: (_, splits) => (log[side] ? decades : spelled)(splits),
        ...(log[side] && { splits: (_chart, _axis, low, high) => marks(low, high), filter: (_, splits) => splits }),
        ...(!log[side] && whole(side === 0 ? [this.given.at] : series.map((line) => line.values)) && { incrs: INTEGERS }),
        ...extra,
      });
      this.chart = new uPlot({
        width: this.width(),
        height: HEIGHT,
        padding: [12, 12, null, null],
        legend: { show: false },
        scales: {
          x: { time: false, distr: log[0] ? 3 : 1, range: (chart, low, high) => this.across(chart.data[0], low, high) },
          y: { distr: log[1] ? 3 : 1, range: (_, low, high) => this.upright(low, high) },
        },
        axes: [
          axis(0, {
            label: this.given.x, labelSize: 20, labelFont: "12px system-ui, sans-serif",
            space: 56, size: 28,
          }),
          axis(1, { space: 36, size: widest }),
        ],
        series: [{}, ...edges, ...lines, ...smooth],
        bands: bands.map((band, index) => ({
          series: [1 + 2 * index, 2 + 2 * index],
          fill: () => colour(`plot-${band.colour}`, 0.16),
        })),
        cursor: {
          y: false,
          focus: { prox: -1 },
          points: { size: 7 },
          drag: { x: true, y: false, setScale: false },
          bind: { dblclick: () => () => { this.view.show(null); return null; } },
          ...(this.view.key && { sync: {
            key: this.view.key, scales: ["x", null],
            // The view is shared already; only the pointer is not.
            filters: { pub: (kind) => kind === "mousemove" || kind === "mouseleave" },
          } }),
        },
        hooks: {
          setSelect: [(chart) => this.selected(chart)],
          setCursor: [(chart) => this.read(chart.cursor.idx)],
        },
      }, this.columns(), this.host);
      this.draw();
    }

    line(line, points) {
      const only = line.values.filter((value) => value != null).length === 1;
      return {
        label: line.name,
        stroke: () => colour(`plot-${line.colour}`),
        width: 1.75,
        dash: line.dashed ? [6, 4] : undefined,
        spanGaps: !line.broken,
        paths: line.line ? undefined : () => null,
        points: {
          show: points || only,
          size: 6,
          width: 1,
          stroke: () => colour(`plot-${line.colour}`),
          fill: () => colour(`plot-${line.colour}`),
        },
      };
    }

    // Ends of the axes.
    across(places, low, high) {
      if (this.view.zoom) return this.view.zoom;
      if (places.length === 1) low = high = places[0];  // uPlot would go from 0 to 100
      const [first, last] = [Math.min(low, ...this.given.cover[0]), Math.max(high, ...this.given.cover[0])];
      if (this.given.log[0]) return [first / 1.2, last * 1.2];
      const room = 0.02 * (last - first) || 1;
      return [first - room, last + room];
    }

    upright(low, high) {
      if (low == null) return this.given.log[1] ? [1, 10] : [0, 1];
      const [first, last] = [Math.min(low, ...this.given.cover[1]), Math.max(high, ...this.given.cover[1])];
      if (this.given.log[1]) return [first / 1.2, last * 1.2];
      const room = 0.06 * (last - first) || 0.1 * Math.abs(last) || 1;
      return [first >= 0 && first < room ? 0 : first - room, last + room];
    }

    width() {
      const style = getComputedStyle(this.figure);
      const inside = this.figure.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
      return Math.max(160, Math.floor(inside));
    }

    fit() {
      if (this.chart && this.chart.width !== this.width()) {
        this.chart.setSize({ width: this.width(), height: HEIGHT });
      }
    }

    // What the pointer or the keyboard is at; the last values where it is nowhere.
    read(index) {
      const at = index ?? this.given.at.length - 1;
      const { data } = this.chart;
      this.given.series.forEach((line, number) => {
        if (index == null && !this.view.key) { // the last of all is not the newest
          this.values[number].textContent = "";
          return;
        }
        const value = near(data[this.base + number], at);
        const mean = this.smooth(line) ? near(data[this.base + number + this.given.series.length], at) : null;
        this.values[number].textContent = exact(value) + (mean == null ? "" : ` (${exact(mean)})`);
      });
      this.place.textContent = index == null ? "" : `at ${exact(Math.round(this.given.at[at] * 100) / 100)} ${this.given.x}`;
    }

    toggle(index) {
      const shown = !this.chart.series[this.base + index].show;
      this.buttons[index].ariaPressed = String(shown);
      this.chart.setSeries(this.base + index, { show: shown });
      this.chart.setSeries(this.base + index + this.given.series.length, { show: shown });
    }

    selected(chart) {
      const { left, width } = chart.select;
      if (width < 4) return;
      const ends = [chart.posToVal(left, "x"), chart.posToVal(left + width, "x")];
      chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      this.view.show(ends);
    }

    // Zoom by a factor around the cursor, or the middle.
    scale(factor) {
      const { min, max } = this.chart.scales.x;
      const index = this.chart.cursor.idx;
      const log = this.given.log[0];
      const [to, from] = log ? [Math.log, Math.exp] : [(x) => x, (x) => x];
      const [low, high] = [to(min), to(max)];
      const middle = index == null ? (low + high) / 2 : to(this.given.at[index]);
      const ends = [middle - (middle - low) * factor, middle + (high - middle) * factor];
      const [first, last] = this.ends.map(to);
      if (factor > 1 && ends[0] <= first && ends[1] >= last) this.view.show(null);
      else if (ends[1] > ends[0]) this.view.show(ends.map(from));
    }

    key(event) {
      if (!this.chart || event.ctrlKey || event.metaKey || event.altKey) return;
      const [first, last] = this.chart.series[0].idxs; // those in view
      const here = this.chart.cursor.idx ?? last;
      const far = event.shiftKey ? 10 : 1;
      const to = {
        ArrowLeft: Math.max(first, here - far), ArrowRight: Math.min(last, here + far),
        Home: first, End: last,
      }[event.key];
      if (to !== undefined) {
        const left = this.chart.valToPos(this.given.at[to], "x");
        this.chart.setCursor({ left, top: HEIGHT / 3 });
        this.said.textContent = `${this.given.x} ${exact(this.given.at[to])}: `
          + this.given.series.map((line, index) => `${line.name} ${this.values[index].textContent}`).join(", ");
      } else if (event.key === "+" || event.key === "=") {
        this.scale(0.5);
      } else if (event.key === "-") {
        this.scale(2);
      } else if (event.key === "0") {
        this.view.show(null);
      } else {
        return;
      }
      event.preventDefault();
    }
  }

  // Room that the labels of an upright axis take.
  function widest(chart, values, index, cycle) {
    const axis = chart.axes[index];
    if (cycle > 1) return axis._size;
    const longest = (values ?? []).reduce((a, b) => (b ?? "").length > a.length ? b : a, "");
    chart.ctx.font = axis.font[0];
    const text = chart.ctx.measureText(longest).width / devicePixelRatio;
    return Math.ceil(axis.ticks.size + axis.gap + text + 4);
  }

  // The charts of one place of the page, with their controls.
  class Plots {
    constructor(root, number) {
      this.root = root;
      this.address = root.dataset.plots;
      this.shared = "shared" in root.dataset;
      this.plots = [];
      this.views = [];
      this.smoothing = 0;
      this.group = this.shared ? this.view(`plots-${number}`) : null;
      this.grid = make("div", { className: "plot-grid" });
      this.note = make("p", { className: "soft", role: "status" });
      this.bar = this.controls();
      root.replaceChildren(this.bar, this.note, this.grid);
      this.load();
    }

    // What the charts of one horizontal axis show of it.
    view(key) {
      const own = this;
      const view = {
        key,
        zoom: null,
        get smoothing() { return own.smoothing; },
        show(zoom) {
          view.zoom = zoom;
          own.redraw();
          if (own.shared) own.load(); // with as many points of the part alone
        },
      };
      this.views.push(view);
      return view;
    }

    controls() {
      const button = (text, act) => {
        const node = make("button", { type: "button", textContent: text });
        node.addEventListener("click", act);
        return node;
      };
      const bar = make("div", { className: "plot-bar", role: "group", ariaLabel: "View of the charts", hidden: true });
      if ("smooth" in this.root.dataset) {
        const slider = make("input", { type: "range", min: "0", max: String(SMOOTHEST), step: "0.01", value: "0" });
        const shown = make("output", { textContent: "0" });
        slider.addEventListener("input", () => {
          this.smoothing = Number(slider.value);
          shown.textContent = slider.value;
          this.redraw();
        });
        bar.append(make("label", {}, "Smoothing ", slider, " ", shown));
      }
      const zoom = (factor) => () => {
        for (const plot of this.shared ? this.plots.slice(0, 1) : this.plots) plot.chart && plot.scale(factor);
      };
      bar.append(
        button("Zoom in", zoom(0.5)),
        button("Zoom out", zoom(2)),
        button("Reset zoom", () => this.reset()),
        make("span", { className: "hint", textContent: "Drag over a chart to zoom; double-click shows all." }),
      );
      return bar;
    }

    reset() {
      for (const view of this.views) view.zoom = null;
      this.redraw();
      if (this.shared) this.load();
    }

    redraw() {
      for (const plot of this.plots) plot.chart && plot.draw();
    }

    async load() {
      const zoom = this.group?.zoom;
      const ask = new URL(this.address, location.href);
      if (zoom) {
        ask.searchParams.set("from", zoom[0]);
        ask.searchParams.set("to", zoom[1]);
      }
      this.asked?.abort();
      this.asked = new AbortController();
      const { signal } = this.asked;
      this.root.ariaBusy = "true";
      try {
        const answer = await fetch(ask, { credentials: "same-origin", signal });
        if (!answer.ok) throw new Error(`status ${answer.status}`);
        this.take((await answer.json()).plots);
        this.note.textContent = "";
      } catch (error) {
        if (signal.aborted) return; // by a newer question
        this.note.textContent = `The values of the charts did not come (${error.message}).`;
      }
      this.root.ariaBusy = null;
    }

    take(given) {
      if (!given.length && this.group?.zoom) return; // no step lies there; what was drawn stays
      this.bar.hidden = !given.length;
      while (this.plots.length > given.length) {
        const last = this.plots.pop();
        last.drop();
        last.figure.remove();
      }
      given.forEach((values, index) => {
        if (this.plots[index]) {
          this.plots[index].take(values);
        } else {
          this.plots.push(new Plot(this.grid, this.group ?? this.view(""), values));
        }
      });
    }
  }

  const all = [...document.querySelectorAll("[data-plots]")].map((root, number) => new Plots(root, number));
  document.addEventListener("shoal:live", () => all.forEach((one) => one.load()));

  // Another theme has other colours.
  const again = () => all.forEach((one) => one.plots.forEach((plot) => plot.chart?.redraw(false)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  new MutationObserver(again).observe(document.documentElement, { attributeFilter: ["data-theme"] });
})();
