// The slider of the head maps, and the charts. Everything that is drawn stands in the page's tables as well; texts are
// put in as text, never as markup.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";

  function svg(parent, name, attributes, text) {
    const e = document.createElementNS(SVG, name);
    for (const key in attributes) e.setAttribute(key, attributes[key]);
    if (text !== undefined) e.textContent = text;
    return parent.appendChild(e);
  }
  function html(parent, name, className, text) {
    const e = document.createElement(name);
    if (className) e.className = className;
    if (text !== undefined) e.textContent = text;
    return parent.appendChild(e);
  }
  const percent = (x) => +(100 * x).toPrecision(3) + " %";

  // ---- Head maps ----

  function nearest(ratios, ratio) {
    let best = 0;
    ratios.forEach((r, i) => { if (Math.abs(r - ratio) < Math.abs(ratios[best] - ratio)) best = i; });
    return best;
  }

  function showMap(index, ratio) {
    const table = data.tables[index], row = nearest(table.ratios, ratio);
    const kept = table.kept[row], deviation = table.deviation && table.deviation[row];
    document.querySelectorAll(`table.heat[data-table="${index}"] td`).forEach((cell, h) => {
      const at = Math.round(100 * Math.sqrt(Math.min(1000, Math.max(0, kept[h])) / 1000));
      cell.style.background = data.colours[at];
      cell.className = (data.light[at] ? "light" : "dark") + (deviation && deviation[h] > kept[h] ? " unsure" : "");
      cell.textContent = kept[h] > 0 && kept[h] < 10 ? "." + kept[h] : Math.round(kept[h] / 10);
    });
    document.querySelector(`output[data-of="${index}"]`).textContent = percent(table.ratios[row]) + " pruned";
  }

  function startSlider() {
    const ratios = [...new Set(data.tables.flatMap((t) => t.ratios))].sort((a, b) => a - b);
    const box = document.getElementById("slider");
    const input = box.querySelector("input"), out = box.querySelector("output");
    if (ratios.length < 2) return;
    const show = () => {
      const ratio = ratios[+input.value];
      out.textContent = percent(ratio);
      data.tables.forEach((_, i) => showMap(i, ratio));
    };
    input.max = ratios.length - 1;
    input.value = nearest(ratios, data.tables[0].shown);
    out.textContent = percent(ratios[+input.value]);
    input.addEventListener("input", show);
    box.hidden = false;
  }

  // ---- Charts ----

  const LEFT = 58, RIGHT = 14, TOP = 10, FOOT = 38;

  // 1, 2 or 5 times a power of ten, so that a span has five to ten steps.
  function niceStep(span) {
    const step = 10 ** Math.floor(Math.log10(span));
    return step * (span / step < 2 ? 0.2 : span / step < 5 ? 0.5 : 1);
  }

  function scales(chart, width, height) {
    const values = chart.series.flatMap((s) => [...s.y, ...(s.low || []), ...(s.high || [])])
      .filter((v) => v !== null && (!chart.logarithmic || v > 0));
    let most = Math.max(...values), least = Math.min(...values), ticks = [];
    if (!values.length) most = 1, least = 0;
    const x0 = chart.x[0], x1 = chart.x[chart.x.length - 1];
    const x = (v) => LEFT + (width - LEFT - RIGHT) * (x1 > x0 ? (v - x0) / (x1 - x0) : 0.5);
    let place;
    if (chart.logarithmic) {
      // From a 1, 2 or 5 times a power of ten to another; these are ticks where they are few.
      const steps = [];
      for (let k = -12; k < 12; k++) for (const m of [1, 2, 5]) steps.push(m * 10 ** k);
      const high = steps.find((v) => v >= most * (1 - 1e-9));
      const low = Math.max(steps.findLast((v) => v <= least * (1 + 1e-9)), high * 1e-8);
      const all = high / low < 300;
      ticks = steps.filter((v) => v >= low && v <= high && (all || Math.abs(Math.log10(v) % 1) < 1e-9));
      place = (v) => Math.log10(Math.max(v, low) / low) / (Math.log10(high / low) || 1);
    } else {
      // Shares begin at 0; other numbers where they begin, unless that is near 0.
      const from = chart.shares || least < 0.5 * most ? Math.min(0, least) : least - 0.08 * (most - least);
      const to = chart.shares ? Math.min(1, most * 1.05) || 1 : most + 0.05 * (most - from) || 1;
      const step = niceStep(to - from);
      for (let v = Math.ceil(from / step) * step; v <= to + 1e-9; v += step) ticks.push(v);
      place = (v) => (v - from) / (to - from);
    }
    return { x, y: (v) => TOP + (height - TOP - FOOT) * (1 - place(v)), ticks };
  }

  function putMark(parent, series, x, y) {
    const r = 3.4, full = series.mark !== "ring" && series.mark !== "cross";
    const shapes = { square: `M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}Z`,
      diamond: `M${x} ${y - r - 1}l${r + 1} ${r + 1}l${-r - 1} ${r + 1}l${-r - 1} ${-r - 1}Z`,
      up: `M${x} ${y - r - 1}l${r + 1} ${2 * r}h${-2 * r - 2}Z`,
      down: `M${x} ${y + r + 1}l${r + 1} ${-2 * r}h${-2 * r - 2}Z`,
      cross: `M${x - r} ${y - r}l${2 * r} ${2 * r}M${x - r} ${y + r}l${2 * r} ${-2 * r}` };
    const attributes = { class: full ? "mark full" : "mark", style: `--c:${series.colour}` };
    if (shapes[series.mark]) svg(parent, "path", { ...attributes, d: shapes[series.mark] });
    else svg(parent, "circle", { ...attributes, cx: x, cy: y, r });
  }

  // Runs of points without a gap.
  function stretches(n, isThere) {
    const runs = [];
    for (let i = 0; i < n; i++) {
      if (!isThere(i)) continue;
      if (i > 0 && isThere(i - 1)) runs[runs.length - 1].push(i);
      else runs.push([i]);
    }
    return runs;
  }

  function putSeries(root, chart, s, at) {
    const point = (values) => (i) => `${at.x(chart.x[i]).toFixed(1)} ${at.y(values[i]).toFixed(1)}`;
    const style = `--c:${s.colour}`, drawn = (v) => v !== null && (!chart.logarithmic || v > 0);
    if (s.low)
      for (const run of stretches(chart.x.length, (i) => s.low[i] !== null && s.high[i] !== null))
        svg(root, "path", { class: "band", style,
          d: `M${run.map(point(s.high)).join("L")}L${run.reverse().map(point(s.low)).join("L")}Z` });
    for (const run of stretches(chart.x.length, (i) => drawn(s.y[i])))
      svg(root, "path", { class: "line", style, d: `M${run.map(point(s.y)).join("L")}`,
        "stroke-dasharray": s.dash ? `${s.dash} ${s.dash}` : "none" });
    // Lines of many points are marked at different places, so that marks of lines that run together stay apart.
    const every = Math.ceil(chart.x.length / 20), n = chart.series.length;
    const first = Math.floor(every * (2 * chart.series.indexOf(s) + 1) / (2 * n)) % every;
    chart.x.forEach((x, i) => { if (drawn(s.y[i]) && i % every === first) putMark(root, s, at.x(x), at.y(s.y[i])); });
  }

  function putAxes(root, chart, at, width, height) {
    const label = (v) => chart.shares ? percent(v) : String(+v.toPrecision(4));
    for (const v of at.ticks) {
      svg(root, "path", { class: "grid", d: `M${LEFT} ${at.y(v)}H${width - RIGHT}` });
      svg(root, "text", { class: "axis", x: LEFT - 6, y: at.y(v) + 4, "text-anchor": "end" }, label(v));
    }
    const few = chart.x.length <= 12;
    let end = -1e9;
    for (const v of few ? chart.x : [...Array(11).keys()].map((i) => i / 10)) {
      if (v < chart.x[0] - 1e-9 || v > chart.x[chart.x.length - 1] + 1e-9) continue;
      svg(root, "path", { class: "grid", d: `M${at.x(v)} ${TOP}V${height - FOOT + 4}` });
      if (at.x(v) - end < 24) continue; // labels that would touch
      end = at.x(v);
      const text = +(100 * v).toPrecision(4);
      svg(root, "text", { class: "axis", x: end, y: height - FOOT + 17, "text-anchor": "middle" }, text);
    }
    const middle = (LEFT + width - RIGHT) / 2;
    svg(root, "text", { class: "axis", x: middle, y: height - 4, "text-anchor": "middle" }, chart.x_label);
  }

  function followPointer(box, root, chart, at, width) {
    const rule = svg(root, "path", { class: "grid", d: "" }), tip = html(box, "div", "tip");
    const show = (v) => v === null ? "–" : chart.shares ? percent(v) : String(+v.toPrecision(3));
    tip.hidden = true;
    root.addEventListener("pointermove", (event) => {
      const bounds = root.getBoundingClientRect(), x = (event.clientX - bounds.left) * width / bounds.width;
      let i = 0;
      chart.x.forEach((v, k) => { if (Math.abs(at.x(v) - x) < Math.abs(at.x(chart.x[i]) - x)) i = k; });
      rule.setAttribute("d", `M${at.x(chart.x[i])} ${TOP}V${root.viewBox.baseVal.height - FOOT}`);
      tip.textContent = [percent(chart.x[i]) + " pruned", ...chart.series.map((s) => s.name + ": " + show(s.y[i]) +
        (s.low && s.low[i] !== null ? ` (${show(s.low[i])} to ${show(s.high[i])})` : ""))].join("\n");
      tip.hidden = false;
      const right = at.x(chart.x[i]) < width / 2;
      tip.style.left = right ? "auto" : LEFT + 6 + "px";
      tip.style.right = right ? RIGHT + 6 + "px" : "auto";
    });
    root.addEventListener("pointerleave", () => { tip.hidden = true; rule.setAttribute("d", ""); });
  }

  function draw(box, room = box.clientWidth) {
    const chart = data.charts[+box.dataset.chart];
    const width = Math.max(260, room), height = Math.round(Math.min(340, Math.max(220, 0.6 * width)));
    box.textContent = "";
    box.dataset.width = box.clientWidth;
    const root = svg(box, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": chart.title });
    const at = scales(chart, width, height);
    putAxes(root, chart, at, width, height);
    for (const s of chart.series) putSeries(root, chart, s, at);
    followPointer(box, root, chart, at, width);
    const keys = html(box, "div", "keys");
    for (const s of chart.series) {
      const key = html(keys, "span"), sample = svg(key, "svg", { viewBox: "0 0 30 12" });
      svg(sample, "path", { class: "line", style: `--c:${s.colour}`, d: "M0 6H30",
        "stroke-dasharray": s.dash ? `${s.dash} ${s.dash}` : "none" });
      putMark(sample, s, 15, 6);
      key.append(s.name);
    }
  }

  startSlider();
  const boxes = document.querySelectorAll(".plot");
  const drawAll = (room) => boxes.forEach((box) => draw(box, room));
  const PRINTED = 340; // half a sheet of paper
  drawAll();
  addEventListener("beforeprint", () => drawAll(PRINTED));
  addEventListener("afterprint", () => drawAll());
  // A chart is drawn for its width, so that its letters keep their size.
  const watch = new ResizeObserver((entries) => entries.forEach(({ target }) => {
    if (Math.abs(target.clientWidth - target.dataset.width) > 8) draw(target);
  }));
  boxes.forEach((box) => watch.observe(box));
})();
