// Completion of a spec's keys and values by its JSON Schema: an offered list below the editor.

/** Returns `{from, offers: [{text, detail}]}` for the caret in a YAML text: the keys that may stand there, or values. */
export function offersAt(schema, text, caret) {
  const lines = text.slice(0, caret).split("\n");
  const line = lines.pop();
  const indent = /^ */.exec(line)[0].length;
  const value = /^( *(?:- )?)([\w.-]+): +(\S*)$/.exec(line);
  const path = pathTo(lines, indent);
  if (value) {
    const field = resolve(schema, at(schema, path)?.properties?.[value[2]]);
    return { from: caret - value[3].length, offers: valuesOf(schema, field).filter((each) => each.text.startsWith(value[3])) };
  }
  const typed = /([\w.-]*)$/.exec(line)[1];
  const place = at(schema, path);
  const present = siblings(text, lines.length, indent);
  const offers = Object.entries(place?.properties ?? {})
    .filter(([name]) => name.startsWith(typed) && name !== typed && !present.has(name))
    .map(([name, field]) => ({ text: `${name}: `, detail: field.description ?? "" }));
  return { from: caret - typed.length, offers };
}

/** The keys above a line, from the outermost: those with less indentation. */
function pathTo(lines, indent) {
  const path = [];
  for (const line of [...lines].reverse()) {
    const found = /^( *)(?:- )?([\w.-]+):(?:\s|$)/.exec(line);
    if (found && found[1].length < indent) {
      path.unshift(found[2]);
      indent = found[1].length;
    }
  }
  return path;
}

/** The keys that stand in the same mapping as the line with that number. */
function siblings(text, number, indent) {
  const lines = text.split("\n");
  const names = new Set();
  for (const step of [-1, 1]) {
    for (let at = number + step; at >= 0 && at < lines.length; at += step) {
      const found = /^( *)([\w.-]+):/.exec(lines[at]);
      if (found && found[1].length < indent) break;
      if (found && found[1].length === indent) names.add(found[2]);
    }
  }
  return names;
}

/** The schema of the mapping at a path; any key of a mapping with free names leads to its one schema. */
function at(schema, path) {
  return path.reduce((place, key) => {
    const inner = place?.properties?.[key] ?? (typeof place?.additionalProperties === "object" ? place.additionalProperties : null);
    return resolve(schema, inner);
  }, schema);
}

/** Follows references, and takes the alternative that has fields. */
function resolve(schema, part) {
  if (!part) return null;
  if (part.$ref) return resolve(schema, schema.$defs[part.$ref.split("/").at(-1)]);
  if (part.type === "array" && part.items) return resolve(schema, part.items);
  if (part.properties || !part.anyOf) return part;
  const choices = part.anyOf.map((each) => resolve(schema, each));
  return choices.find((each) => each?.properties) ?? { ...part, choices };
}

function valuesOf(schema, field) {
  const all = (part) => [...(part?.enum ?? []), ...("const" in (part ?? {}) ? [part.const] : []),
    ...(part?.type === "boolean" ? [true, false] : []), ...(part?.choices ?? []).flatMap(all)];
  return [...new Set(all(field))].filter((value) => value !== null).map((value) => ({ text: String(value), detail: "" }));
}
