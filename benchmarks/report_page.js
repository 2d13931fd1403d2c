"use strict";

// The page's own charts: no library. A chart has two canvases: curves below, drawn when something changes, and above
// them what follows the pointer, so that a hundred runs of a thousand points do not have to be drawn again for it.

const data = JSON.parse(document.getElementById("data").textContent);
const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#8c564b", "#66a61e", "#999999"];
const MARGIN = { left: 68, right: 14, top: 10, bottom: 44 };

function colorOf(i) {
  return i < COLORS.length ? COLORS[i] : `hsl(${(i * 137.5) % 360} 60% 50%)`;
}

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "checked") node.checked = value;
    else if (value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

function short(x) {
  const size = Math.abs(x);
  if (size >= 1e6) return +(x / 1e6).toPrecision(4) + "M";
  if (size >= 1e4) return +(x / 1e3).toPrecision(4) + "k";
  return String(+x.toPrecision(4));
}

// Places for about `count` marks between low and high: 1, 2 or 5 times a power of ten, or the powers themselves.
function ticks(low, high, count, log) {
  const marks = [];
  if (log) {
    const decades = Math.log10(high / low);
    const steps = decades > 3 ? [1] : decades > 0.7 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      for (const step of steps) {
        const mark = step * 10 ** power;
        if (mark >= low && mark <= high) marks.push(mark);
      }
    }
    return marks;
  }
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((k) => k * power >= rough * 0.999);
  for (let k = Math.ceil(low / step); k * step <= high; k++) marks.push(k * step);
  return marks;
}

class Chart {
  // show() takes {lines, bands, xLabel, yLabel, logX, logY}; a line {x, y, color, dash, name, where} and a band
  // {x, y, low, high, color, dash, name, where} have x in rising order.
  constructor(place) {
    this.base = element("canvas");
    this.top = element("canvas", { class: "top", tabindex: "0", role: "img", "aria-label": "curves; the tables below have the numbers" });
    this.tip = element("div", { class: "tip" });
    place.append(this.base, this.top, this.tip);
    this.place = place;
    this.view = null; // what was zoomed to: {x: [low, high], y: [low, high]}
    this.start = null; // where a drag began
    this.top.addEventListener("pointerdown", (event) => this.press(event));
    this.top.addEventListener("pointermove", (event) => this.move(event));
    this.top.addEventListener("pointerup", (event) => this.release(event));
    this.top.addEventListener("pointerleave", () => this.clear());
    this.top.addEventListener("dblclick", () => this.reset());
    this.top.addEventListener("keydown", (event) => event.key === "Escape" && this.reset());
    new ResizeObserver(() => this.draw()).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  show(content) {
    this.content = content;
    this.draw();
  }

  reset() {
    this.view = null;
    this.draw();
  }

  // The shown stretch of each axis, in the units of the data; on a log axis above 0.
  ranges() {
    const { lines, bands, logX, logY } = this.content;
    let [xLow, xHigh, yLow, yHigh] = [Infinity, -Infinity, Infinity, -Infinity];
    const see = (xs, ys) => {
      for (let i = 0; i < xs.length; i++) {
        if ((logX && xs[i] <= 0) || (logY && ys[i] <= 0)) continue;
        if (xs[i] < xLow) xLow = xs[i];
        if (xs[i] > xHigh) xHigh = xs[i];
        if (ys[i] < yLow) yLow = ys[i];
        if (ys[i] > yHigh) yHigh = ys[i];
      }
    };
    for (const line of lines) see(line.x, line.y);
    for (const band of bands) {
      see(band.x, band.low);
      see(band.x, band.high);
    }
    if (xLow > xHigh) [xLow, xHigh, yLow, yHigh] = [logX ? 1 : 0, logX ? 10 : 1, logY ? 1 : 0, logY ? 10 : 1];
    if (!logX && xLow > 0 && xLow < 0.2 * xHigh) xLow = 0;
    const wider = (low, high, log) => {
      if (low === high) return log ? [low / 2, high * 2] : [low - 1, high + 1];
      if (log) return [low / (high / low) ** 0.03, high * (high / low) ** 0.03];
      return [low - 0.03 * (high - low), high + 0.03 * (high - low)];
    };
    const whole = { x: xLow === xHigh ? wider(xLow, xHigh, logX) : [xLow, xHigh], y: wider(yLow, yHigh, logY) };
    if (this.view && !(logX && this.view.x[0] <= 0) && !(logY && this.view.y[0] <= 0)) return this.view;
    return whole;
  }

  scales() {
    const { logX, logY } = this.content;
    const { x, y } = this.ranges();
    const [width, height] = [this.place.clientWidth, this.place.clientHeight];
    const to = (log) => (log ? Math.log10 : (v) => v);
    const [fx, fy] = [to(logX), to(logY)];
    const [x0, x1, y0, y1] = [fx(x[0]), fx(x[1]), fy(y[0]), fy(y[1])];
    const w = width - MARGIN.left - MARGIN.right;
    const h = height - MARGIN.top - MARGIN.bottom;
    return {
      x, y, width, height, w, h,
      toX: (v) => MARGIN.left + ((fx(v) - x0) / (x1 - x0)) * w,
      toY: (v) => MARGIN.top + (1 - (fy(v) - y0) / (y1 - y0)) * h,
      fromX: (p) => { const v = x0 + ((p - MARGIN.left) / w) * (x1 - x0); return logX ? 10 ** v : v; },
      fromY: (p) => { const v = y0 + (1 - (p - MARGIN.top) / h) * (y1 - y0); return logY ? 10 ** v : v; },
    };
  }

  context(canvas) {
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [this.place.clientWidth, this.place.clientHeight];
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    return context;
  }

  draw() {
    if (!this.content || !this.place.clientWidth) return;
    const context = this.context(this.base);
    context.fillStyle = getComputedStyle(this.place).color;
    const soft = context.fillStyle;
    const scales = (this.at = this.scales());
    const { lines, bands, logX, logY, xLabel, yLabel } = this.content;

    context.font = "12px system-ui, sans-serif";
    context.lineWidth = 1;
    context.globalAlpha = 0.14;
    context.strokeStyle = soft;
    context.beginPath();
    const xMarks = ticks(...scales.x, scales.w / 90, logX);
    const yMarks = ticks(...scales.y, scales.h / 50, logY);
    for (const mark of xMarks) {
      context.moveTo(scales.toX(mark), MARGIN.top);
      context.lineTo(scales.toX(mark), MARGIN.top + scales.h);
    }
    for (const mark of yMarks) {
      context.moveTo(MARGIN.left, scales.toY(mark));
      context.lineTo(MARGIN.left + scales.w, scales.toY(mark));
    }
    context.stroke();
    context.globalAlpha = 0.8;
    context.textAlign = "center";
    for (const mark of xMarks) context.fillText(short(mark), scales.toX(mark), MARGIN.top + scales.h + 16);
    context.fillText(xLabel, MARGIN.left + scales.w / 2, scales.height - 8);
    context.textAlign = "right";
    for (const mark of yMarks) context.fillText(short(mark), MARGIN.left - 6, scales.toY(mark) + 4);
    context.save();
    context.translate(14, MARGIN.top + scales.h / 2);
    context.rotate(-Math.PI / 2);
    context.textAlign = "center";
    context.fillText(yLabel, 0, 0);
    context.restore();

    context.save();
    context.beginPath();
    context.rect(MARGIN.left, MARGIN.top, scales.w, scales.h);
    context.clip();
    context.lineJoin = "round";
    for (const line of lines) {
      context.globalAlpha = bands.length ? 0.3 : 0.85;
      this.stroke(context, line, 1);
    }
    for (const band of bands) {
      context.globalAlpha = 0.16;
      context.fillStyle = band.color;
      context.beginPath();
      const inside = this.inside(band.x, band.high);
      for (const i of inside) context.lineTo(scales.toX(band.x[i]), scales.toY(band.high[i]));
      for (const i of inside.reverse()) context.lineTo(scales.toX(band.x[i]), scales.toY(logY ? Math.max(band.low[i], scales.y[0]) : band.low[i]));
      context.fill();
      context.globalAlpha = 1;
      this.stroke(context, band, 2.2);
    }
    context.restore();
    this.clear();
  }

  inside(xs, ys) {
    const { logX, logY } = this.content;
    const found = [];
    for (let i = 0; i < xs.length; i++) if (!(logX && xs[i] <= 0) && !(logY && ys[i] <= 0)) found.push(i);
    return found;
  }

  stroke(context, line, width) {
    const { toX, toY } = this.at;
    const { logX, logY } = this.content;
    context.strokeStyle = line.color;
    context.lineWidth = width;
    context.setLineDash(line.dash ? [5, 4] : []);
    context.beginPath();
    let shown = 0;
    let last = [0, 0];
    for (let i = 0; i < line.x.length; i++) {
      if ((logX && line.x[i] <= 0) || (logY && line.y[i] <= 0)) continue;
      last = [toX(line.x[i]), toY(line.y[i])];
      if (shown++) context.lineTo(...last);
      else context.moveTo(...last);
    }
    context.stroke();
    context.setLineDash([]);
    if (shown === 1) {
      context.fillStyle = line.color;
      context.beginPath();
      context.arc(...last, 3, 0, 2 * Math.PI);
      context.fill();
    }
  }

  clear() {
    if (!this.content) return;
    this.context(this.top);
    this.tip.style.display = "none";
  }

  position(event) {
    const box = this.place.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  // The shown point nearest to the pointer, within 30 pixels; runs are looked at around the pointer's place only.
  nearest(px, py) {
    const { toX, toY, fromX } = this.at;
    const { logX, logY, lines, bands } = this.content;
    const target = fromX(px);
    let best = null;
    let distance = 30;
    for (const line of [...lines, ...bands]) {
      let [low, high] = [0, line.x.length - 1];
      while (low < high) {
        const middle = (low + high) >> 1;
        if (line.x[middle] < target) low = middle + 1;
        else high = middle;
      }
      for (let i = Math.max(0, low - 3); i <= Math.min(line.x.length - 1, low + 3); i++) {
        if ((logX && line.x[i] <= 0) || (logY && line.y[i] <= 0)) continue;
        const d = Math.hypot(toX(line.x[i]) - px, toY(line.y[i]) - py);
        if (d < distance) [best, distance] = [{ line, i }, d];
      }
    }
    return best;
  }

  press(event) {
    this.start = this.position(event);
    this.top.setPointerCapture(event.pointerId);
  }

  move(event) {
    if (!this.at) return;
    const [px, py] = this.position(event);
    const context = this.context(this.top);
    this.tip.style.display = "none";
    if (this.start && Math.hypot(px - this.start[0], py - this.start[1]) > 6) {
      context.globalAlpha = 0.15;
      context.fillStyle = getComputedStyle(this.place).color;
      context.fillRect(this.start[0], this.start[1], px - this.start[0], py - this.start[1]);
      return;
    }
    const found = this.nearest(px, py);
    if (!found) return;
    const { line, i } = found;
    context.save();
    context.beginPath();
    context.rect(MARGIN.left, MARGIN.top, this.at.w, this.at.h);
    context.clip();
    this.stroke(context, line, 2.6);
    context.restore();
    const [x, y] = [this.at.toX(line.x[i]), this.at.toY(line.y[i])];
    context.fillStyle = line.color;
    context.beginPath();
    context.arc(x, y, 4.5, 0, 2 * Math.PI);
    context.fill();
    const interval = line.low ? ` [${short(line.low[i])}, ${short(line.high[i])}]` : "";
    this.tip.replaceChildren(
      element("b", {}, line.name),
      `${this.content.xLabel}: ${line.x[i].toLocaleString("en")}`, element("br"),
      `${this.content.yLabel}: ${short(line.y[i])}${interval}`,
      element("small", {}, line.where || ""),
    );
    this.tip.style.display = "block";
    const left = x + 14 + this.tip.offsetWidth > this.at.width ? x - 14 - this.tip.offsetWidth : x + 14;
    this.tip.style.left = `${Math.max(0, left)}px`;
    this.tip.style.top = `${Math.min(Math.max(0, y - 20), this.at.height - this.tip.offsetHeight)}px`;
  }

  release(event) {
    const [px, py] = this.position(event);
    const start = this.start;
    this.start = null;
    if (start && Math.abs(px - start[0]) > 6 && Math.abs(py - start[1]) > 6) {
      const { fromX, fromY } = this.at;
      this.view = {
        x: [fromX(Math.min(px, start[0])), fromX(Math.max(px, start[0]))],
        y: [fromY(Math.max(py, start[1])), fromY(Math.min(py, start[1]))],
      };
      this.draw();
    }
  }
}

function choice(label, options, chosen, change) {
  const select = element("select", { onchange: () => change(select.value) });
  for (const [value, text] of options) select.append(element("option", { value, selected: value === chosen }, text));
  return element("label", {}, label, select);
}

function tick(label, checked, change) {
  const box = element("input", { type: "checkbox", checked, onchange: () => change(box.checked) });
  return element("label", {}, box, label);
}

function curves() {
  const section = document.getElementById("curves");
  if (!data.lines.length) return;
  const state = { env: data.envs[0], metric: "", axis: "steps", logX: false, logY: false, runs: true, bands: true };
  const hidden = new Set(); // keys of runs that are not shown
  const plot = element("div", { class: "plot" });
  const legend = element("div", { class: "legend" });
  const controls = element("div", { class: "controls" });
  const note = element("p", { class: "note" });
  section.append(element("h2", {}, "Curves"), controls, element("div", { class: "chart" }, plot, legend), note);
  const chart = new Chart(plot);
  const settings = [...new Set(data.lines.map((line) => line.setting))];
  const keyOf = (line) => `${line.setting}\n${line.env}\n${line.run}`;
  const there = () => data.lines.filter((line) => line.env === state.env && line.metric === state.metric);
  const metricsOf = (env) => data.metrics.filter(([key]) => data.lines.some((line) => line.env === env && line.metric === key));

  function update(zoomed = false) {
    if (!zoomed) chart.view = null;
    const shown = there().filter((line) => !hidden.has(keyOf(line)) && line[state.axis]);
    const bands = data.bands.filter((band) =>
      band.env === state.env && band.metric === state.metric && band.axis === state.axis &&
      there().filter((line) => line.setting === band.setting).every((line) => !hidden.has(keyOf(line))));
    const draw = (line) => ({ color: colorOf(settings.indexOf(line.setting)), dash: line.imported, where: line.where });
    chart.show({
      lines: state.runs ? shown.map((line) => ({ ...draw(line), x: line[state.axis], y: line.y, name: `${line.setting}, ${line.run}` })) : [],
      bands: state.bands ? bands.map((band) => ({ ...draw(band), ...band, y: band.value, name: `${band.setting}, IQM of ${band.runs} run${band.runs > 1 ? "s" : ""}` })) : [],
      xLabel: state.axis === "steps" ? data.units : "wall-clock seconds",
      yLabel: data.metrics.find(([key]) => key === state.metric)[1],
      logX: state.logX, logY: state.logY,
    });
    const below = state.logY ? shown.reduce((sum, line) => sum + line.y.filter((y) => y <= 0).length, 0) : 0;
    const without = there().filter((line) => !line[state.axis]).length;
    note.textContent = [
      "Thin: single runs, their own points. Thick: interquartile mean over the runs of a setting with its 95 % bootstrap interval, as far as its shortest run; it is left out while one of its runs is hidden.",
      "Drag to zoom, double-click or Escape to see all.",
      below ? `${below} points at or below 0 have no place on a logarithmic axis.` : "",
      without ? `${without} runs have no seconds.` : "",
    ].filter(Boolean).join(" ");
  }

  function list() {
    legend.replaceChildren();
    for (const setting of settings) {
      const own = there().filter((line) => line.setting === setting);
      if (!own.length) continue;
      const turn = (lines, on) => { for (const line of lines) on ? hidden.delete(keyOf(line)) : hidden.add(keyOf(line)); };
      const all = element("input", { type: "checkbox", checked: own.some((line) => !hidden.has(keyOf(line))) });
      all.addEventListener("change", () => { turn(own, all.checked); for (const box of runs.querySelectorAll("input")) box.checked = all.checked; update(true); });
      const runs = element("div", { class: "runs" });
      for (const line of own) {
        const box = element("input", { type: "checkbox", checked: !hidden.has(keyOf(line)), onchange: () => {
          turn([line], box.checked);
          all.checked = own.some((other) => !hidden.has(keyOf(other)));
          update(true);
        } });
        runs.append(element("label", { title: line.where || "" }, box, line.run));
      }
      const swatch = element("span", { class: own[0].imported ? "swatch imported" : "swatch", style: `color: ${colorOf(settings.indexOf(setting))}` });
      legend.append(element("details", {}, element("summary", {}, all, swatch, `${setting} (${own.length})`), runs));
    }
    legend.append(element("div", { class: "controls" },
      element("button", { type: "button", onclick: () => { for (const line of there()) hidden.delete(keyOf(line)); list(); update(true); } }, "all"),
      element("button", { type: "button", onclick: () => { for (const line of there()) hidden.add(keyOf(line)); list(); update(true); } }, "none")));
  }

  function rebuild() {
    const metrics = metricsOf(state.env);
    if (!metrics.some(([key]) => key === state.metric)) state.metric = metrics[0][0];
    controls.replaceChildren(
      choice("", data.envs.map((env) => [env, env]), state.env, (value) => { state.env = value; rebuild(); }),
      choice("", metrics, state.metric, (value) => { state.metric = value; rebuild(); }),
      choice("over", [["steps", data.units], ["seconds", "wall-clock seconds"]], state.axis, (value) => { state.axis = value; update(); }),
      tick("log x", state.logX, (on) => { state.logX = on; update(); }),
      tick("log y", state.logY, (on) => { state.logY = on; update(); }),
      tick("runs", state.runs, (on) => { state.runs = on; update(true); }),
      tick("IQM", state.bands, (on) => { state.bands = on; update(true); }),
      element("button", { type: "button", onclick: () => chart.reset() }, "whole"),
    );
    list();
    update();
  }
  rebuild();
}

function profiles() {
  const section = document.getElementById("profiles");
  for (const profile of data.profiles) {
    const plot = element("div", { class: "plot", style: "height: 22rem" });
    const hidden = new Set();
    const legend = element("div", { class: "legend" });
    section.append(element("h2", {}, "Performance profile"), element("p", { class: "note" }, profile.note),
      element("div", { class: "chart" }, plot, legend));
    const chart = new Chart(plot);
    const update = () => chart.show({
      lines: [], logX: false, logY: false, xLabel: "score τ on the common scale", yLabel: "share of runs above τ",
      bands: profile.settings.map((own, i) => ({ ...own, x: profile.levels, y: own.value, color: colorOf(i) })).filter((own) => !hidden.has(own.name)),
    });
    profile.settings.forEach((own, i) => {
      const box = element("input", { type: "checkbox", checked: true, onchange: () => { box.checked ? hidden.delete(own.name) : hidden.add(own.name); update(); } });
      legend.append(element("label", {}, box, element("span", { class: "swatch", style: `color: ${colorOf(i)}` }), own.name));
    });
    update();
  }
}

curves();
profiles();
