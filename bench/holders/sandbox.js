// A sandbox of `pagefold bench sandboxes` in Node.js: it does what sandbox.py does, and obeys the same lines.
const crypto = require('crypto')
const readline = require('readline')
const vm = require('vm')

const [seed, mib] = process.argv.slice(2).map(Number)
const held = {}

const sha = (data) => crypto.createHash('sha256').update(data).digest('hex')
const digest = (value) => sha(JSON.stringify(value))

// Numbers from 0 to 1, the same for the same seed (mulberry32).
function generator(state) {
  return () => {
    state = (state + 0x6d2b79f5) | 0
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state)
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296
  }
}

// Node's own modules as text: the same in every sandbox.
function modules() {
  const texts = Object.entries(process.binding('natives')).filter(([, text]) => typeof text === 'string')
  return texts.sort(([one], [other]) => (one < other ? -1 : 1))
}

function work() {
  const own = generator(seed)
  const below = (count) => Math.floor(own() * count)
  const sources = []
  let bytes = 0
  // A package is unpacked more than once: there is less of it than of Python's.
  for (let copy = 0; bytes < (mib << 20) / 4; copy++) {
    for (const [name, text] of modules()) {
      if (bytes >= (mib << 20) / 4) break
      sources.push([name, Buffer.from(`// ${copy}\n${text}`)])
      bytes += text.length
    }
  }
  // A part of it is compiled, and fails where it is no script.
  held.scripts = sources.slice(0, mib).map(([name, source]) => compile(name, source))
  // Notes of its own, some of which are edited, and holes.
  const words = [...new Set(sources.slice(0, 20).flatMap(([, source]) => source.toString().split(/\s+/)))].sort()
  const text = () => Array.from({ length: 40 }, () => words[below(words.length)]).join(' ')
  const notes = Array.from({ length: mib * 400 }, (_, id) => ({ id, text: text(), values: Array.from({ length: 8 }, own) }))
  let scratch = Array.from({ length: mib * 50 }, () => Buffer.alloc(1000 + below(4000)))
  for (let count = 0; count < notes.length / 10; count++) notes[below(notes.length)].text += ` edited by ${seed}`
  scratch = scratch.filter((_, place) => place % 2)
  const picked = Array.from({ length: 200 }, () => below(notes.length))
  Object.assign(held, { sources, notes, scratch, picked })
  held.reply = digest(picked.map((number) => notes[number]))
  held.all = everything()
}

function compile(name, source) {
  try {
    return new vm.Script(`(function (exports, require, module, process, internalBinding, primordials) {${source}})`, { filename: name })
  } catch {
    return null
  }
}

function everything() {
  const sizes = held.scratch.reduce((sum, block) => sum + block.length, 0)
  return digest([digest(held.notes), ...held.sources.map(([, source]) => sha(source)), sizes])
}

const commands = {
  work: () => (work(), true),
  round: () => {
    held.sources.slice(0, mib / 4).forEach(([name, source]) => compile(name, source))
    return digest(held.notes.map((note) => ({ ...note, text: note.text + ' edited again' }))) !== held.all
  },
  reply: () => digest(held.picked.map((number) => held.notes[number])) === held.reply,
  compare: () => everything() === held.all,
}

console.log('ready')
readline.createInterface({ input: process.stdin }).on('line', (line) => console.log(commands[line.trim()]() ? 'right' : 'wrong'))
