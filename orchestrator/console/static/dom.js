// Elements from values. Foreign text becomes text nodes only; nothing here parses HTML.

/** Returns an element. `attributes` with null, undefined or false are left out; `style` sets custom properties. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") {
      for (const [property, each] of Object.entries(value)) element.style.setProperty(property, each);
    } else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Makes the children of `parent` equal to `children`, and keeps the elements that are already there: a page that is
 *  rendered again keeps its focus, its scroll position, its open `details` and what was typed. */
export function render(parent, ...children) {
  const fresh = document.createElement(parent.nodeName);
  fresh.append(...children.flat(Infinity).filter(Boolean));
  renderChildren(parent, fresh);
}

function renderChildren(old, fresh) {
  const keyed = new Map([...old.children].filter(keyOf).map((child) => [keyOf(child), child]));
  let at = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    const kept = keyed.get(keyOf(child));
    if (kept && kept !== at) {
      old.insertBefore(kept, at);
      at = kept;
    }
    if (at === null) {
      old.append(child);
    } else {
      const next = at.nextSibling;
      renderNode(at, child);
      at = next;
    }
  }
  while (at !== null) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function renderNode(old, fresh) {
  if (old.nodeName !== fresh.nodeName || keyOf(old) !== keyOf(fresh)) {
    old.replaceWith(fresh);
  } else if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
  } else {
    if (old.style.cssText !== fresh.style.cssText) old.style.cssText = fresh.style.cssText;
    for (const { name, value } of [...fresh.attributes]) { // the policy allows no `style` attribute
      if (name !== "style" && old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    for (const { name } of [...old.attributes]) {
      if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
    }
    if (!old.hasAttribute("data-own")) renderChildren(old, fresh); // else a plot or an editor, which fills itself
  }
}

function keyOf(node) {
  return node.nodeType === Node.ELEMENT_NODE ? node.getAttribute("data-key") : null;
}
