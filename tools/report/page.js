// The slider of the head maps. Texts are put in as text, never as markup.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
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

  startSlider();
})();
