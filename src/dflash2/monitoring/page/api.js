// Talks to the server the page came from. The token, if one is asked for, stays in this tab.

const KEY = "dflash2-token";

// A link may carry the token behind "#token=", which browsers do not send to any server.
const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  sessionStorage.setItem(KEY, given);
  history.replaceState(null, "", location.pathname);
}

export class Refused extends Error {}
export class NeedsToken extends Refused {}

export function setToken(token) {
  sessionStorage.setItem(KEY, token);
}

export async function get(path) {
  return answer(await request(path, {}));
}

export async function post(path, body) {
  return answer(await request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  }));
}

export async function download(path, name) {
  const response = await request(path, {});
  if (!response.ok) throw new Refused(await reason(response));
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await response.blob());
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

function request(path, options) {
  const token = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  return fetch(path, { ...options, headers, cache: "no-store" });
}

async function answer(response) {
  if (response.status === 401) throw new NeedsToken("a token is needed");
  if (!response.ok) throw new Refused(await reason(response));
  return response.json();
}

async function reason(response) {
  try {
    const body = await response.json();
    return body.error?.message ?? body.detail ?? `status ${response.status}`;
  } catch {
    return `status ${response.status}`;
  }
}
