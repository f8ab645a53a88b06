// The controls of lab.what_if: native sliders and lists, so that keys and screen readers work.
// See sliders.py for what the model holds.

export default {
  render({ model, el }) {
    const root = make("div", "lab-sliders", { role: "group", "aria-label": "what if" });
    const style = document.createElement("style");
    style.textContent = STYLE;
    const message = make("div", "lab-message", { role: "status" });
    el.replaceChildren(root);
    let controls = [];

    const choose = (name, index) => {
      model.set("chosen", { ...model.get("chosen"), [name]: index });
      model.save_changes();
    };
    const show = () => controls.forEach(({ name, set }) => set(model.get("chosen")[name]));
    const tell = () => { message.textContent = model.get("message"); };
    const lay = () => {
      controls = model.get("controls").map((control) => build(control, choose));
      root.replaceChildren(style, ...controls.map(({ label }) => label), message);
      show();
    };
    const heard = { "change:controls": lay, "change:chosen": show, "change:message": tell };
    for (const [event, action] of Object.entries(heard)) model.on(event, action);
    lay();
    tell();
    return () => { for (const [event, action] of Object.entries(heard)) model.off(event, action); };
  },
};

const KEYS = { "data-lm-suppress-shortcuts": "true" }; // else JupyterLab takes the arrow keys

function build({ name, text, options, list }, choose) {
  const label = make("label", ""), caption = make("span", ""), shown = make("output", "");
  caption.textContent = text;
  if (list) {
    const input = make("select", "", KEYS);
    input.append(...options.map((option) => new Option(option)));
    input.addEventListener("change", () => choose(name, input.selectedIndex));
    label.append(caption, input);
    return { name, label, set: (index) => { input.selectedIndex = index; } };
  }
  const input = make("input", "", { type: "range", min: 0, max: options.length - 1, ...KEYS });
  const write = () => {
    shown.textContent = options[input.value];
    input.setAttribute("aria-valuetext", options[input.value]);
  };
  input.addEventListener("input", write);
  input.addEventListener("change", () => choose(name, Number(input.value)));
  shown.setAttribute("aria-hidden", "true"); // the slider says it
  label.append(caption, input, shown);
  return { name, label, set: (index) => { input.value = index; write(); } };
}

function make(tag, className, attributes = {}) {
  const element = document.createElement(tag);
  element.className = className;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

const STYLE = `
.lab-sliders { display: grid; grid-template-columns: repeat(auto-fill, minmax(320px, 1fr)); gap: 4px 28px;
  color: var(--jp-ui-font-color1, #24292f); font: 13px system-ui, sans-serif; padding: 6px 2px; }
.lab-sliders label { display: flex; align-items: center; gap: 10px; min-height: 26px; }
.lab-sliders label span { flex: 0 0 108px; }
.lab-sliders input { flex: 1; min-width: 0; accent-color: var(--jp-brand-color1, #1976d2); cursor: pointer; }
.lab-sliders output { flex: 0 0 44px; text-align: right; font-variant-numeric: tabular-nums; font-weight: 600; }
.lab-sliders select { flex: 1; font: inherit; color: inherit; padding: 2px 6px; border-radius: 3px;
  background: var(--jp-layout-color1, #fff); border: 1px solid var(--jp-border-color1, #bdbdbd); }
.lab-sliders :focus-visible { outline: 2px solid var(--jp-brand-color1, #1976d2); outline-offset: 2px; }
.lab-message { grid-column: 1 / -1; min-height: 18px; color: var(--jp-warn-color0, #b34700); }
`;
