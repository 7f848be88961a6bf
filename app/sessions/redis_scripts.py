"""What Redis does in one go: Lua scripts that change values and what is noted of them together.

For each kind of values two keys note what there is: KEYS[1], a sorted set of names by the time at which each ends, in
microseconds, which is also the order of their last use; and KEYS[2], a hash of each name's size, with the sum under the empty name.
A name is what follows the prefix (ARGV[1]) in the key of a value, so that nothing written into these two can lead to foreign keys.

Redis may expire or evict any key by itself, those two included. So every script first checks that they agree, and otherwise makes
them anew from what is there; each `PUT` looks whether some of the names still have values; and a name whose time has come is
dropped. Works with Redis 6.2 and later. Keys of one call lie in several slots: a Redis Cluster is not supported.
"""

from __future__ import annotations

from typing import Final

_NOTES: Final = """
local ends, sizes, prefix = KEYS[1], KEYS[2], ARGV[1]
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local total

local function numbers(first, last)
  local read = {}
  for i = first, last do read[#read + 1] = tonumber(ARGV[i]) end
  return read
end

local function name_of(key) return string.sub(key, #prefix + 1) end

local function size_of(name)
  return tonumber(redis.call('HGET', sizes, name) or '0') or 0
end

local function note(name, ends_at)
  local size = redis.call('STRLEN', prefix .. name)
  total = total + size - size_of(name)
  redis.call('HSET', sizes, name, size)
  redis.call('ZADD', ends, ends_at, name)
end

local function forget(name)
  total = total - size_of(name)
  redis.call('HDEL', sizes, name)
  redis.call('ZREM', ends, name)
end

local function drop(name)
  redis.call('UNLINK', prefix .. name)
  forget(name)
end

local function has_head(key, head)
  return redis.pcall('GETRANGE', key, 0, #head - 1) == head  -- a key of another type gives an error, as a value
end

local function mend()
  local types = redis.call('TYPE', ends).ok .. redis.call('TYPE', sizes).ok
  local names, sized = {}, {}
  if types == 'nonenone' then total = 0 return end
  if types == 'zsethash' then
    total = tonumber(redis.call('HGET', sizes, '') or 'x')
    if total and total >= 0 and redis.call('HLEN', sizes) == redis.call('ZCARD', ends) + 1 then return end
  end
  if string.sub(types, 1, 4) == 'zset' then names = redis.call('ZRANGE', ends, 0, -1) end
  if string.sub(types, -4) == 'hash' then sized = redis.call('HKEYS', sizes) end
  redis.call('DEL', ends, sizes)
  total = 0
  for _, list in ipairs({names, sized}) do
    for _, name in ipairs(list) do
      if name ~= '' and redis.call('TYPE', prefix .. name).ok == 'string' then
        note(name, now + redis.call('PTTL', prefix .. name) * 1000)
      end
    end
  end
end

local function save(ttl)
  if redis.call('ZCARD', ends) == 0 then redis.call('DEL', ends, sizes) return end
  redis.call('HSET', sizes, '', string.format('%.0f', total))
  for i = 1, 2 do
    if redis.call('PTTL', KEYS[i]) < ttl then redis.call('PEXPIRE', KEYS[i], ttl) end
  end
end

mend()
"""

PUT: Final = (
    _NOTES
    + """
-- KEYS[3..]: values' keys.
-- ARGV: prefix, ttl in ms, when used (0: now), place of the first in its row, most bytes, most, ttl of these values alone, values
local ttl, used_at, place, most_bytes, most, lease = unpack(numbers(2, 7))
if used_at == 0 then used_at = now end
for i = 3, #KEYS do
  redis.call('SET', KEYS[i], ARGV[i + 5], 'PX', lease)
  note(name_of(KEYS[i]), used_at + ttl * 1000 - place - i)
end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', ends, '-inf', now, 'LIMIT', 0, 100)) do drop(name) end
local looks = 2 * #KEYS  -- more than are put: so stale names become fewer however fast Redis evicts
for _, names in ipairs({redis.call('ZRANGE', ends, 0, looks - 1), redis.call('ZRANDMEMBER', ends, looks)}) do
  for _, name in ipairs(names) do
    if redis.call('EXISTS', prefix .. name) == 0 then forget(name) end
  end
end
local function owner_of(name) return string.match(name, '^(%x+):') or '' end

-- The longest unused of who has most: by a sample, as thousands of names would have to be gone through.
local function next_to_go()
  local sample, has, most_of = redis.call('ZRANDMEMBER', ends, 64), {}, nil
  for _, name in ipairs(sample) do
    local owner = owner_of(name)
    has[owner] = (has[owner] or 0) + (total > most_bytes and size_of(name) or 1)
    if not most_of or has[owner] > has[most_of] then most_of = owner end
  end
  for _, name in ipairs(redis.call('ZRANGE', ends, 0, 63)) do
    if owner_of(name) == most_of then return name end
  end
  local oldest, ends_at
  for _, name in ipairs(sample) do
    local at = tonumber(redis.call('ZSCORE', ends, name))
    if owner_of(name) == most_of and (not oldest or at < ends_at) then oldest, ends_at = name, at end
  end
  return oldest
end

while total > most_bytes or redis.call('ZCARD', ends) > most do
  local name = next_to_go()
  if not name then break end
  drop(name)
end
save(ttl)
return used_at
"""
)
"""Set values, then drop the longest unused of the owner that has most until the limits hold; when they count as used.

An owner is what names have before a colon, in hexadecimal; of those without one, all are the same.
"""

USE: Final = (
    _NOTES
    + """
-- KEYS[3..]: values' keys.
-- ARGV: prefix, ttl in ms, when used (0: now), place of the first in its row, 1 to end with the first that is not there, head
local ttl, used_at, place, leading = unpack(numbers(2, 5))
if used_at == 0 then used_at = now end
local there = {used_at}
for i = 3, #KEYS do
  local name = name_of(KEYS[i])
  there[i - 1] = 0
  if has_head(KEYS[i], ARGV[6]) then
    redis.call('PEXPIRE', KEYS[i], ttl)
    note(name, used_at + ttl * 1000 - place - i)
    there[i - 1] = 1
  else
    if redis.call('HEXISTS', sizes, name) == 1 then forget(name) end
    if leading == 1 then break end
  end
end
save(ttl)
return there
"""
)
"""Let the times to live of values begin anew, if wanted only up to the first that is not there.

When they count as used, then 1 for each that is there, else 0.
"""

DELETE: Final = (
    _NOTES
    + """
-- KEYS[3..]: values' keys. ARGV: prefix, ttl in ms, head
local count = 0
for i = 3, #KEYS do
  if has_head(KEYS[i], ARGV[3]) then count = count + 1 end
  drop(name_of(KEYS[i]))
end
save(tonumber(ARGV[2]))
return count
"""
)
"""Forget values; how many were there."""
