-- Holds a file in strings; see README.md.
local path, size = arg[1], tonumber(arg[2])
local held = {}
local file = assert(io.open(path, 'rb'))
for block in function() return file:read(size) end do
  if #block == size then held[#held + 1] = block end
end
collectgarbage()
print('ready')
io.stdout:flush()
if not io.read() then os.exit(1) end
file:seek('set')
local right = #held > 0
for _, block in ipairs(held) do right = right and block == file:read(size) end
print(right and 'right' or 'wrong')
