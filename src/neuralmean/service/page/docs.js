"use strict";
// Shows /openapi.json without asking another site for a viewer.

function element(name, text, className) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function describe(path, method, operation) {
  const part = element("div", "", "operation");
  const head = element("p");
  head.append(element("code", `${method.toUpperCase()} ${path}`));
  part.append(head, element("p", operation.description || operation.summary));
  const details = element("details");
  details.append(element("summary", "Parameters, body and answers"));
  const list = element("ul");
  for (const parameter of operation.parameters || []) list.append(element("li", `${parameter.name} (${parameter.in}): ${parameter.schema.type || ""}`));
  for (const type of Object.keys((operation.requestBody || {}).content || {})) list.append(element("li", `body: ${type}`));
  for (const [status, answer] of Object.entries(operation.responses)) list.append(element("li", `${status}: ${answer.description}`));
  details.append(list);
  part.append(details);
  return part;
}

async function show() {
  const place = document.getElementById("operations");
  try {
    const token = sessionStorage.getItem("nmd-token");
    const response = await fetch("/openapi.json", { headers: token ? { Authorization: `Bearer ${token}` } : {} });
    if (!response.ok) throw new Error((await response.json()).error);
    const description = await response.json();
    const parts = [];
    for (const [path, methods] of Object.entries(description.paths))
      for (const [method, operation] of Object.entries(methods)) parts.push(describe(path, method, operation));
    place.replaceChildren(element("p", description.info.description), ...parts);
  } catch (error) {
    place.replaceChildren(element("p", error.message, "problem"));
  }
}

show();
