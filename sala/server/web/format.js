// Numbers, sizes and times in readable form.

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export const formatCount = (count) => WHOLE.format(count);

export function formatCompact(count) {
  if (count < 1000) return String(Math.round(count));
  if (count < 1_000_000) return `${trim(count / 1000, count < 100_000 ? 1 : 0)}k`;
  return `${trim(count / 1_000_000, 2)}M`;
}

export function formatSize(bytes) {
  if (bytes < 1000) return `${bytes} B`;
  if (bytes < 1_000_000) return `${trim(bytes / 1000, 0)} kB`;
  return `${trim(bytes / 1_000_000, 1)} MB`;
}

export function formatSeconds(seconds) {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  return formatWait(seconds);
}

export function formatWait(seconds) {
  const whole = Math.max(1, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

export function formatRate(perSecond) {
  return perSecond < 100 ? trim(perSecond, 1) : formatCount(perSecond);
}

// "1.50" becomes "1.5", "2.0" becomes "2".
function trim(number, digits) {
  return String(Number(number.toFixed(digits)));
}

export function titleOf(text, files = []) {
  const line = text.split("\n").map((part) => part.trim()).find((part) => part !== "") ?? files[0]?.name ?? "New chat";
  const plain = line.replace(/\s+/g, " ");
  return plain.length <= 60 ? plain : `${plain.slice(0, 59).trimEnd()}…`;
}

export function dayGroup(time, now = Date.now()) {
  const midnight = new Date(now).setHours(0, 0, 0, 0);
  const day = 24 * 3600 * 1000;
  if (time >= midnight) return "Today";
  if (time >= midnight - day) return "Yesterday";
  if (time >= midnight - 7 * day) return "Last 7 days";
  if (time >= midnight - 30 * day) return "Last 30 days";
  return "Earlier";
}
