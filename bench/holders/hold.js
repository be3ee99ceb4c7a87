// Holds a file in buffers, or in strings if a third argument is given; see README.md.
const fs = require('fs')
const [, , path, word, strings] = process.argv
const size = Number(word)
const read = (file, block) => fs.readSync(file, block, 0, size, null) === size
const held = (block) => (strings ? block.toString('latin1') : Buffer.from(block))
const blocks = []
const file = fs.openSync(path)
for (const block = Buffer.alloc(size); read(file, block); ) blocks.push(held(block))
fs.closeSync(file)
console.log('ready')
process.stdin.once('data', () => {
  const file = fs.openSync(path)
  const expected = Buffer.alloc(size)
  const same = (block) => (strings ? block === expected.toString('latin1') : block.equals(expected))
  const right = blocks.length > 0 && blocks.every((block) => read(file, expected) && same(block))
  console.log(right ? 'right' : 'wrong')
  process.exit(0)
})
