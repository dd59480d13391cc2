// Makes characters visible that could hide, reorder or imitate others: names and texts come from uploaders and models.

const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}]/gu;
const NAMES = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };

/** The text with control characters and bidirectional overrides escaped. */
export function visible(text) {
  return text.replace(HIDDEN, escaped);
}

/** The same, but line breaks and tabs stay. */
export function visibleLines(text) {
  return text.replace(HIDDEN, (character) => ("\n\t".includes(character) ? character : escaped(character)));
}

/** The text with long repetitions of a mark counted: a prompt has a thousand marks such as <|image_pad|> for a picture. */
export function shortened(text) {
  return text.replace(/(<[^<>\s]{1,40}>)\1{7,}/g, (marks, mark) => `${mark} × ${marks.length / mark.length} `);
}

/** The text of a token with visible white space; a token without text is shown by its id. */
export function visibleToken(text, id) {
  if (!text) return `#${id}`;
  return visibleLines(text)
    .replace(/\t/g, "⇥\t")
    .replace(/\n/g, "⏎\n")
    .replace(/^ +$| {2,}| +(?=⏎)/g, (spaces) => "·".repeat(spaces.length));
}

// How the server writes a token that is a part of a character: a byte-level tokenizer's, and SentencePiece's.
const BYTE = /\\x([89a-f][0-9a-f])|<0x([89A-F][0-9A-F])>/g;
const encoder = new TextEncoder();
const read = new WeakMap();

/**
 * The text of a row of GET /v1/batches/{id}/tokens, { text, starts }, with the place in it where each token begins.
 * Characters that several tokens share are whole: the later ones begin where the character does.
 */
export function readable(row) {
  if (!read.has(row)) read.set(row, joined(row.tokens));
  return read.get(row);
}

function joined(tokens) {
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  let text = "";
  const starts = tokens.map((token) => {
    const at = text.length;
    text += decoder.decode(bytesOf(token ?? ""), { stream: true });
    return at;
  });
  return { text: text + decoder.decode(), starts };
}

function bytesOf(token) {
  const bytes = [];
  let end = 0;
  for (const match of token.matchAll(BYTE)) {
    bytes.push(...encoder.encode(token.slice(end, match.index)), Number.parseInt(match[1] ?? match[2], 16));
    end = match.index + match[0].length;
  }
  return Uint8Array.from([...bytes, ...encoder.encode(token.slice(end))]);
}

function escaped(character) {
  if (character in NAMES) return NAMES[character];
  const code = character.codePointAt(0);
  if (code < 256) return `\\x${code.toString(16).padStart(2, "0")}`;
  return code < 65536 ? `\\u${code.toString(16).padStart(4, "0")}` : `\\U${code.toString(16).padStart(8, "0")}`;
}
