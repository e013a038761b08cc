--[[ Admission of slurm-synergy's jobs. Lua 5.1 to 5.4; Slurm 22.05 and newer.

Jobs for the managed partition are checked, marked requeueable and held: only an operator or the
controller lets them start. Their owner may cancel and rename them, shorten their time limit and
change their hints, but not hold, release or reshape them. All other jobs pass untouched.
Whatever the form in which GPUs are asked for, the request is rewritten to GPUs per node.
With the setting mode = "observe" or "advise" managed jobs pass too; they only get a mark.

Slurm accepts a job unchanged when this script raises an error. Therefore a managed job is held
before it is looked at, and any error on its way means refusal.

Settings: synergy_site.lua beside this file (see synergy_site.lua.example). After editing it, touch
this file or restart slurmctld. A site with a job_submit.lua of its own loads this file with dofile
and calls the two global functions below from its own.
]]

local DEFAULTS = {
  partition = "synergy",
  mode = "act",
  interactive = "refuse",
  heterogeneous = "refuse",
  operators = { 0 },
  endpoint = nil,
  shapes = {},
}

local MARK = "synergy:v=1"
local HINT_EXAMPLE = "--comment=synergy:profile=resnet18-imagenet,min_mem=20G"
local GPU_EXAMPLE = "--gres=gpu:N or --gres=gpu:TYPE:N (GPUs per node), with -N K for K nodes"
local NO_VAL16, NO_VAL, NO_VAL64 = 65534, 4294967294, 1.8e19

-- A refusal is raised as a table so that it cannot be taken for a run-time error.
local function refuse(format, ...)
  error({ refusal = string.format(format, ...) }, 0)
end

-- settings ------------------------------------------------------------------------------------

local function directory_of_this_file()
  local source = debug.getinfo(1, "S").source
  return string.match(source, "^@(.*/)") or "./"
end

local function check_site(site)
  assert(type(site) == "table", "it must return a table")
  for key, value in pairs(site) do
    local kind = ({ partition = "string", operators = "table", endpoint = "string",
      shapes = "table", mode = "string", interactive = "string",
      heterogeneous = "string" })[key]
    assert(kind, "unknown setting " .. tostring(key))
    assert(type(value) == kind, key .. " must be a " .. kind)
  end
  local mode = site.mode or DEFAULTS.mode
  assert(mode == "observe" or mode == "advise" or mode == "act",
    "mode must be observe, advise or act")
  for _, key in ipairs({ "interactive", "heterogeneous" }) do
    local way = site[key] or DEFAULTS[key]
    assert(way == "refuse" or way == "pass", key .. " must be refuse or pass")
  end
  for _, uid in pairs(site.operators or {}) do
    assert(type(uid) == "number", "operators must be a list of numeric user ids")
  end
  for _, shape in pairs(site.shapes or {}) do
    assert(type(shape) == "table" and type(shape.type) == "string", "a shape needs a type")
    for _, key in ipairs({ "nodes", "gpus" }) do
      assert(type(shape[key]) == "number", "shape " .. shape.type .. " needs the number " .. key)
    end
    for _, key in ipairs({ "cores", "mem_mib" }) do
      assert(shape[key] == nil or type(shape[key]) == "number",
        key .. " of shape " .. shape.type .. " must be a number")
    end
  end
end

-- Returns the settings, and what is wrong with the site's file (nil when nothing is).
local function load_site()
  local site = {}
  for key, value in pairs(DEFAULTS) do site[key] = value end
  local path = directory_of_this_file() .. "synergy_site.lua"
  local file = io.open(path, "r")
  if not file then return site, nil end
  local text = file:read("*a") or ""
  file:close()
  local ok, given = pcall(function()
    local table_given = dofile(path)
    check_site(table_given)
    return table_given
  end)
  if ok then
    for key, value in pairs(given) do site[key] = value end
    return site, nil
  end
  -- Even from a broken file take the partition's name: its jobs must not slip through.
  site.partition = string.match("\n" .. text, "\n%s*partition%s*=%s*[\"']([^\"'\n]+)[\"']")
    or site.partition
  -- And its mode: where nothing is acted on, nothing is refused either.
  site.mode = string.match("\n" .. text, "\n%s*mode%s*=%s*[\"']([^\"'\n]+)[\"']") or site.mode
  return site, path .. ": " .. tostring(given)
end

local SITE, SITE_ERROR
do
  local ok, site, problem = pcall(load_site)
  if ok then
    SITE, SITE_ERROR = site, problem
  else
    SITE, SITE_ERROR = DEFAULTS, tostring(site)
  end
  if SITE_ERROR then
    pcall(slurm.log_error, "slurm-synergy: managed jobs are refused: %s", SITE_ERROR)
  end
end

local function is_operator(uid)
  for _, known in pairs(SITE.operators) do
    if known == uid then return true end
  end
  return uid == 0
end

-- which jobs are ours -------------------------------------------------------------------------

local function names_managed(partition)
  if partition == SITE.partition then return true end
  if not string.find(partition, ",", 1, true) then return false end
  for name in string.gmatch(partition, "[^,%s]+") do
    if name == SITE.partition then return true end
  end
  return false
end

local function is_managed(partition, part_list)
  if partition ~= nil then return names_managed(partition) end
  -- No partition given: ours only if the site made it the default.
  local ours = part_list and part_list[SITE.partition]
  return ours ~= nil and ours.flag_default == 1
end

-- numbers -------------------------------------------------------------------------------------

-- Slurm says "not given" by the highest values of a type, and newer releases hand out floats.
local function given(value)
  if value == nil or value == NO_VAL16 or value == NO_VAL or value >= NO_VAL64 then return nil end
  return math.floor(value)
end

local function given_mib(value)
  if value == nil or value == NO_VAL or value >= 9.2e18 then return nil end
  return math.floor(value)
end

-- Nine digits fit every Lua's integers; fifteen are exact in a double, for which "%d" is too small.
local DIGITS, MOST_DIGITS = 9, 15

local function whole(text, digits)
  if #text > (digits or DIGITS) or not string.match(text, "^%d+$") then return nil end
  return tonumber(text)
end

-- "1 GPU", "2 GPUs".
local function some(number, thing)
  return string.format("%d %s%s", number, thing, number == 1 and "" or "s")
end

-- MiB the way --mem takes them.
local function show_mib(mib)
  if mib % 1024 == 0 then return string.format("%.0fG", mib / 1024) end
  return string.format("%.0fM", mib)
end

-- hints ---------------------------------------------------------------------------------------

local function positive(text, digits)
  local number = whole(text, digits)
  return number and number > 0 and number or nil
end

local function amount_of_work(text) return positive(text, MOST_DIGITS) end

local function batch_range(text)
  local low, high = string.match(text, "^(%d+)%-(%d+)$")
  if not low then return positive(text) end
  low, high = positive(low), positive(high)
  return low and high and low <= high and text or nil
end

local function matching(pattern)
  return function(text) return string.match(text, pattern) end
end

local MIB_PER_UNIT = { [""] = 1, M = 1, G = 1024, T = 1024 * 1024 }

-- In MiB.
local function size(text)
  local number, unit = string.match(text, "^(%d+%.?%d*)([MGT]?)$")
  if not number or #number > 9 or tonumber(number) <= 0 then return nil end
  return math.ceil(tonumber(number) * MIB_PER_UNIT[unit])
end

local function one_of(...)
  local allowed = {}
  for _, word in ipairs({ ... }) do allowed[word] = true end
  return function(text) return allowed[text] and text or nil end
end

local function type_list(text)
  local types = {}
  if string.find("+" .. text .. "+", "++", 1, true) then return nil end
  for name in string.gmatch(text, "[^+]+") do
    if not string.match(name, "^[%w_.-]+$") then return nil end
    types[name] = true
  end
  return types
end

-- The same keys as slurm_synergy/core/hints.py; a test keeps both equal.
local HINTS = {
  batch = { parse = batch_range, example = "batch=256 or batch=128-4096" },
  ckpt_dir = { parse = matching("^/[^,]+$"), example = "ckpt_dir=/scratch/me/run1" },
  elastic = { parse = one_of("rigid", "scale", "full"), example = "elastic=rigid, scale or full" },
  epochs = { parse = amount_of_work, digits = MOST_DIGITS, example = "epochs=90" },
  gpu_types = { parse = type_list, example = "gpu_types=v100+a100" },
  grace_s = { parse = positive, digits = DIGITS, example = "grace_s=60" },
  max_gpus = { parse = positive, digits = DIGITS, example = "max_gpus=16" },
  min_gpus = { parse = positive, digits = DIGITS, example = "min_gpus=2" },
  min_mem = { parse = size, example = "min_mem=20G" },
  profile = { parse = matching("^[%w][%w._-]*$"), example = "profile=resnet18-imagenet" },
  samples = { parse = amount_of_work, digits = MOST_DIGITS, example = "samples=1281167" },
  scale_unit = { parse = positive, digits = DIGITS, example = "scale_unit=2" },
}

local function known_hints()
  local names = {}
  for name in pairs(HINTS) do names[#names + 1] = name end
  table.sort(names)
  return table.concat(names, ", ")
end

-- Longest list "synergy:..." in bytes; the same as in slurm_synergy/core/hints.py.
local MAX_HINT_BYTES = 1024

-- The token "synergy:..." of a comment, without its prefix; nil when there is none.
local function hint_token(comment)
  local found
  for word in string.gmatch(comment or "", "%S+") do
    local prefix, token = string.match(word, "^(%a+):(.*)$")
    if prefix and string.lower(prefix) == "synergy" then
      if #word > MAX_HINT_BYTES then
        refuse("the synergy: list is %d bytes long, and at most %d are taken; shorten names and paths",
          #word, MAX_HINT_BYTES)
      end
      if prefix ~= "synergy" then
        refuse("hints begin with \"synergy:\" in lower case, not \"%s:\"; write synergy:%s",
          prefix, token)
      end
      if found then
        refuse("the comment has more than one synergy: list; put all hints into one, for example %s",
          HINT_EXAMPLE)
      end
      found = token
    end
  end
  return found
end

local function read_hints(comment)
  local token = hint_token(comment)
  local hints = {}
  if token == nil then return hints end
  for item in string.gmatch(token .. ",", "([^,]*),") do
    if item == "" then
      refuse("the list \"synergy:%s\" has an empty hint; hints are one word of key=value and "
        .. "commas, without spaces, for example %s", token, HINT_EXAMPLE)
    end
    local key, value = string.match(item, "^([^=]*)=(.*)$")
    if not key then
      refuse("the hint \"%s\" is not key=value; hints are one word without spaces, and several "
        .. "values of one are joined by \"+\", for example %s", item, HINT_EXAMPLE)
    end
    local hint = HINTS[key]
    if not hint then
      refuse("unknown hint \"%s\"; known hints: %s", key, known_hints())
    end
    if hints[key] ~= nil then refuse("the hint %s is given twice; give it once", key) end
    local parsed = hint.parse(value)
    if parsed == nil then
      local wrong = hint.digits and "is not a whole number from 1 to " .. string.rep("9", hint.digits)
        or "is malformed"
      refuse("the hint %s=%s %s; write %s", key, value, wrong, hint.example)
    end
    hints[key] = parsed
  end
  if hints.min_gpus and hints.max_gpus and hints.min_gpus > hints.max_gpus then
    refuse("the hints min_gpus=%d and max_gpus=%d contradict each other; min_gpus must not be larger",
      hints.min_gpus, hints.max_gpus)
  end
  if hints.scale_unit and hints.max_gpus and hints.scale_unit > hints.max_gpus then
    refuse("the hints scale_unit=%d and max_gpus=%d contradict each other; the job grows in steps of "
      .. "scale_unit, which must not be larger", hints.scale_unit, hints.max_gpus)
  end
  return hints
end

-- GPUs ----------------------------------------------------------------------------------------

local function known_types()
  local seen, names = {}, {}
  for _, shape in ipairs(SITE.shapes) do
    if not seen[shape.type] then
      seen[shape.type] = true
      names[#names + 1] = shape.type
    end
  end
  return seen, table.concat(names, ", ")
end

-- The shapes that have at least so much of something (one that does not say has enough), and the
-- most that any of them has.
local function with_enough(shapes, key, wanted)
  local enough, most = {}, 0
  for _, shape in ipairs(shapes) do
    local has = shape[key] or math.huge
    most = math.max(most, has)
    if has >= wanted then enough[#enough + 1] = shape end
  end
  return enough, most
end

-- All nodes of a job have GPUs of one type.
local function most_nodes_of_a_type(shapes)
  local counts, most = {}, 0
  for _, shape in ipairs(shapes) do
    counts[shape.type] = (counts[shape.type] or 0) + shape.nodes
    most = math.max(most, counts[shape.type])
  end
  return most
end

-- One item of a list such as "gres:gpu:v100:2" (22.05), "gres/gpu:v100:2" or "gres/gpu=2" (newer):
-- how many, and the type or nil.
local function parse_item(item)
  local plain = string.gsub(item, "^gres[:/]", "")
  local rest = string.match(plain, "^gpu$") and "" or string.match(plain, "^gpu[:=](.+)$")
  if not rest then
    refuse("only GPUs can be asked for in partition %s, not \"%s\"; use %s",
      SITE.partition, plain, GPU_EXAMPLE)
  end
  local name, count = string.match(rest, "^([^:=]+)[:=](%d+)$")
  if not name then
    count = string.match(rest, "^%d+$")
    name = not count and rest ~= "" and rest or nil
  end
  if name and not string.match(name, "^[%a_][%w_.-]*$") then
    refuse("\"%s\" is not a GPU request; use %s", plain, GPU_EXAMPLE)
  end
  local number = whole(count or "1")
  if not number then refuse("\"%s\" asks for too many GPUs; use %s", plain, GPU_EXAMPLE) end
  return number, name
end

-- How many GPUs a field asks for, and their type or nil; nil when it asks for none.
local function parse_gres(text)
  local gpus, gpu_type
  for item in string.gmatch(text or "", "[^,]+") do
    -- Newer releases keep -c in the request per task as well ("cpu=2").
    if not string.match(item, "^cpu[:=]") then
      local number, name = parse_item(item)
      if gpus then
        refuse("several GPU types in one request; name one, or none and give the hint "
          .. "gpu_types=v100+a100; use %s", GPU_EXAMPLE)
      end
      gpus, gpu_type = number, name
    end
  end
  if gpus == 0 then gpus = nil end
  return gpus, gpu_type
end

-- What GPUs are counted per, in each of the fields that ask for them.
local COUNTED = {
  { per = "node", field = "tres_per_node" },
  { per = "job", field = "tres_per_job" },
  { per = "task", field = "tres_per_task" },
}

-- The numbers asked for per node, per job and per task, and the one type that they name or nil.
local function asked_gpus(job)
  local asked, gpu_type = {}, nil
  for _, form in ipairs(COUNTED) do
    local count, name = parse_gres(job[form.field])
    if name and gpu_type and name ~= gpu_type then
      refuse("the request names the GPU types %s and %s; name one; use %s", gpu_type, name,
        GPU_EXAMPLE)
    end
    asked[form.per], gpu_type = count, name or gpu_type
  end
  if not (asked.node or asked.job or asked.task) then
    refuse("jobs in partition %s must ask for GPUs; use %s", SITE.partition, GPU_EXAMPLE)
  end
  return asked, gpu_type
end

-- Forms that depend on what Slurm only knows once it has chosen nodes.
local function refuse_other_gpu_forms(job)
  local per_socket, gpu_type = parse_gres(job.tres_per_socket)
  if per_socket then
    local sockets = given(job.sockets_per_node)
    refuse("--gpus-per-socket cannot be used in partition %s; use --gres=gpu:%s%s (GPUs per node)",
      SITE.partition, gpu_type and gpu_type .. ":" or "",
      sockets and string.format("%d", per_socket * sockets) or "N")
  end
  if given(job.ntasks_per_gpu) or given(job.ntasks_per_tres) then
    refuse("--ntasks-per-gpu cannot be used in partition %s; use --ntasks-per-node=N for one task "
      .. "per GPU", SITE.partition)
  end
end

local function check_types(request, hints)
  local seen, list = known_types()
  local gpu_type = request.gpu_type
  if gpu_type and not seen[gpu_type] then
    refuse("there are no GPUs of type %s; known types: %s", gpu_type, list)
  end
  for name in pairs(hints.gpu_types or {}) do
    if not seen[name] then
      refuse("the hint gpu_types names %s, which this cluster lacks; known types: %s", name, list)
    end
  end
  if gpu_type and hints.gpu_types and not hints.gpu_types[gpu_type] then
    refuse("the request names GPU type %s, the hint gpu_types does not; make them agree", gpu_type)
  end
  if request.types and gpu_type and not request.types[gpu_type] then
    refuse("the request names GPU type %s, --constraint does not; make them agree", gpu_type)
  end
  for name in pairs(request.types and hints.gpu_types or {}) do
    if not request.types[name] then
      refuse("the hint gpu_types names %s, --constraint does not; make them agree", name)
    end
  end
end

-- Whether GPUs may change during the job's life.
local function is_elastic(hints)
  return hints.elastic == "scale" or hints.elastic == "full"
end

-- Hints that only an elastic job uses: its user may believe to have one.
local function warn_of_idle_hints(hints)
  local idle = {}
  for _, name in ipairs({ "min_gpus", "max_gpus", "scale_unit" }) do
    if hints[name] then idle[#idle + 1] = name end
  end
  if is_elastic(hints) or #idle == 0 then return end
  pcall(slurm.log_user, "slurm-synergy: without the hint elastic=scale or elastic=full the job keeps "
    .. "the GPUs that it asks for: %s %s no effect", table.concat(idle, " and "),
    #idle == 1 and "has" or "have")
end

-- Refuses an elastic job that could never be given GPUs, or could not be given others later.
local function check_elastic(request, hints, wrapped)
  if not is_elastic(hints) then return end
  if not wrapped then
    refuse("elastic=%s needs a script that starts its steps with synergy-srun: plain srun keeps to "
      .. "the tasks and GPUs of the submission", hints.elastic)
  end
  local asked, unit = request.gpus * request.nodes, hints.scale_unit or 1
  local least = hints.min_gpus or math.min(unit, asked)
  local most = hints.max_gpus or math.max(asked, least)
  if least > most then
    refuse("an elastic job of %d to %s can never run; min_gpus and scale_unit must not be larger "
      .. "than max_gpus", least, some(most, "GPU"))
  end
  if math.floor(most / unit) * unit < least then
    refuse("an elastic job of %d to %s in steps of scale_unit=%d can never run; make max_gpus or "
      .. "the GPUs asked for a multiple of scale_unit", least, some(most, "GPU"), unit)
  end
end

-- Refuses what no kind of node can ever satisfy; the job would wait for it forever.
local function check_supply(request, hints)
  if #SITE.shapes == 0 then return end
  check_types(request, hints)
  local fit, most = {}, 0
  local allowed = request.types or hints.gpu_types
  for _, shape in ipairs(SITE.shapes) do
    if request.gpu_type == shape.type
      or (not request.gpu_type and (not allowed or allowed[shape.type])) then
      fit[#fit + 1] = shape
    end
  end
  local kind = request.gpu_type and (" of type " .. request.gpu_type) or ""
  fit, most = with_enough(fit, "gpus", request.gpus)
  if #fit == 0 then
    refuse("%s per node are more than any node%s has; ask for at most %d per node, and for "
      .. "more nodes with -N", some(request.gpus, "GPU"), kind, most)
  end
  local with = string.format("%s with %s", kind, some(request.gpus, "GPU"))
  local mem_mib = math.max(request.mem_mib, hints.min_mem or 0)
  fit, most = with_enough(fit, "mem_mib", mem_mib)
  if #fit == 0 then
    refuse("%s of memory per node (--mem, --mem-per-cpu or the hint min_mem) is more than any "
      .. "node%s has; ask for at most %s", show_mib(mem_mib), with, show_mib(most))
  end
  fit, most = with_enough(fit, "cores", request.cores)
  if #fit == 0 then
    refuse("%s per node (-c for each task) are more than any node%s has; ask for at most %d, or "
      .. "leave -c out: the controller gives each job the CPUs that it can use",
      some(request.cores, "CPU"), with, most)
  end
  local most_nodes = most_nodes_of_a_type(fit)
  if request.nodes > most_nodes then
    local needs = (mem_mib > 0 or request.cores > 0) and ", the CPUs and the memory asked for" or ""
    refuse("%d nodes with %s%s%s each are more than there are; ask for at most %s", request.nodes,
      some(request.gpus, "GPU"), kind, needs, some(most_nodes, "node"))
  end
end

-- shape ---------------------------------------------------------------------------------------

local function count_nodes(job, asked)
  local least, most = given(job.min_nodes), given(job.max_nodes)
  if most == 0 then most = nil end
  local tasks, per_node = given(job.num_tasks), given(job.ntasks_per_node)
  if per_node == 0 then per_node = nil end
  -- Slurm takes a job of no nodes for one that only makes buffers: it has no CPUs, ever.
  if least == 0 then
    refuse("-N 0 cannot be used in partition %s; use -N K for K nodes", SITE.partition)
  end
  if not least then
    if tasks and per_node then return math.ceil(tasks / per_node) end
    if asked.job and asked.node and asked.job % asked.node == 0 then
      return math.floor(asked.job / asked.node)
    end
    return 1
  end
  if most and most ~= least then
    refuse("node ranges (-N %d-%d) cannot be used in partition %s; use -N K with one number",
      least, most, SITE.partition)
  end
  return least
end

-- The numbers of tasks per node that frameworks work with.
local function task_forms(gpus)
  if gpus == 1 then return "--ntasks-per-node=1" end
  return string.format("one task per node (--ntasks-per-node=1) or one per GPU "
    .. "(--ntasks-per-node=%d)", gpus)
end

-- Tasks on each node as asked for, nil when no number of them is given.
local function plain_tasks_per_node(job, nodes)
  local tasks, per_node = given(job.num_tasks), given(job.ntasks_per_node)
  if per_node and per_node > 0 then return per_node end
  if tasks and tasks % nodes == 0 then return math.floor(tasks / nodes) end
  return nil
end

local function check_same(gpus, other, nodes)
  if gpus and gpus ~= other then
    refuse("the request asks for %d and for %s on each of %s; ask in one form: %s", gpus,
      some(other, "GPU"), some(nodes, "node"), GPU_EXAMPLE)
  end
  return other
end

-- GPUs on each node, from whatever form they are asked for in.
local function gpus_per_node(job, nodes, asked)
  local gpus = asked.node
  local tasks = plain_tasks_per_node(job, nodes)
  if asked.node and asked.task then
    -- sbatch's own arithmetic contradicts itself here (22.05).
    refuse("--gpus-per-task together with --gres or --gpus-per-node cannot be used in partition "
      .. "%s; use --gres=gpu:%d -N %d --ntasks-per-node=%d", SITE.partition, asked.node, nodes,
      math.max(1, math.floor(asked.node / asked.task)))
  end
  if asked.job then
    if asked.job % nodes ~= 0 then
      refuse("%s (--gpus) cannot be spread evenly over %s; use --gres=gpu:N (GPUs per node) with "
        .. "-N %d", some(asked.job, "GPU"), some(nodes, "node"), nodes)
    end
    gpus = check_same(gpus, math.floor(asked.job / nodes), nodes)
  end
  if asked.task then
    if not tasks then
      refuse("--gpus-per-task=%d needs the same number of tasks on each node; use --gres=gpu:N "
        .. "(GPUs per node) with --ntasks-per-node=N", asked.task)
    end
    gpus = check_same(gpus, asked.task * tasks, nodes)
  end
  return gpus
end

-- Tasks per node; 0 when the user asked for no number of tasks.
local function tasks_per_node(job, nodes, gpus)
  local tasks, per_node = given(job.num_tasks), given(job.ntasks_per_node)
  if per_node == 0 then per_node = nil end
  if not per_node then
    if not tasks then return 0 end
    if tasks % nodes ~= 0 then
      refuse("%s cannot be spread evenly over %d nodes; use %s", some(tasks, "task"), nodes,
        task_forms(gpus))
    end
    per_node = math.floor(tasks / nodes)
  end
  if tasks and tasks ~= per_node * nodes then
    refuse("%s in all (-n) and %d per node on %s contradict each other; leave -n out or make them "
      .. "agree", some(tasks, "task"), per_node, some(nodes, "node"))
  end
  if gpus % per_node ~= 0 then
    refuse("%s per node with %s per node; use %s", some(per_node, "task"), some(gpus, "GPU"),
      task_forms(gpus))
  end
  return per_node
end

-- The types of GPUs that a constraint names ("v100", "v100|a100"), as a set and as a list; nil when
-- it says anything else.
local function types_of(features)
  local seen = known_types()
  local inner = string.match(features, "^%[(.*)%]$") or features
  local types, names = {}, {}
  for name in string.gmatch(inner .. "|", "([^|]*)|") do
    if not seen[name] then return nil end
    if not types[name] then names[#names + 1] = name end
    types[name] = true
  end
  table.sort(names)
  return types, names
end

local UNPLANNABLE = {
  { field = "reservation", option = "--reservation", why = "the controller sets its own" },
  { field = "req_nodes", option = "--nodelist", why = "the controller chooses the nodes" },
  { field = "exc_nodes", option = "--exclude", why = "the controller chooses the nodes" },
}
-- Options with numbers; 0 and Slurm's words for "not given" are none.
local CORES = "the controller chooses the cores"
local UNPLANNABLE_NUMBERS = {
  { field = "sockets_per_node", option = "--sockets-per-node", why = CORES },
  { field = "cores_per_socket", option = "--cores-per-socket", why = CORES },
  { field = "threads_per_core", option = "--threads-per-core (or --hint)", why = CORES },
  { field = "ntasks_per_socket", option = "--ntasks-per-socket", why = CORES },
  { field = "ntasks_per_core", option = "--ntasks-per-core", why = CORES },
  { field = "contiguous", option = "--contiguous", why = "the controller chooses the nodes" },
  { field = "req_switch", option = "--switches", why = "the controller chooses the nodes" },
  { field = "time_min", option = "--time-min", why = "give one limit with --time" },
}

local function check_options(job)
  for _, option in ipairs(UNPLANNABLE) do
    local value = job[option.field]
    if value ~= nil and value ~= "" then
      refuse("%s cannot be used in partition %s: %s", option.option, SITE.partition, option.why)
    end
  end
  for _, option in ipairs(UNPLANNABLE_NUMBERS) do
    local value = given(job[option.field])
    if value and value ~= 0 then
      refuse("%s cannot be used in partition %s: %s", option.option, SITE.partition, option.why)
    end
  end
  -- sbatch sets this by itself for -c.
  local least, tasks = given(job.pn_min_cpus), given(job.ntasks_per_node) or given(job.num_tasks)
  if least and least > math.max(1, given(job.cpus_per_task) or 1) * math.max(1, tasks or 1) then
    refuse("--mincpus cannot be used in partition %s: the controller gives each job the CPUs that "
      .. "it can use; -c says how many a task needs", SITE.partition)
  end
  local features = job.features
  if features ~= nil and features ~= "" and not types_of(features) then
    refuse("--constraint=%s cannot be used in partition %s: only GPU types can be chosen (%s), "
      .. "with --constraint, --gres=gpu:TYPE:N or the hint gpu_types=v100+a100", features,
      SITE.partition, select(2, known_types()))
  end
end

local function check_kind(job)
  if string.find(job.partition or "", ",", 1, true) then
    refuse("several partitions are named (%s); name one: -p %s", job.partition, SITE.partition)
  end
  if given(job.het_job_offset) then
    refuse("heterogeneous jobs cannot run in partition %s; submit an ordinary job with "
      .. "--gres=gpu:N and -N K", SITE.partition)
  end
  if job.script == nil then
    refuse("interactive jobs (srun, salloc) cannot run in partition %s; use sbatch, or another "
      .. "partition", SITE.partition)
  end
  local shared = given(job.shared)
  if shared and shared ~= 1 then
    refuse("--exclusive cannot be used in partition %s, where jobs share nodes; ask for all GPUs "
      .. "of a node instead", SITE.partition)
  end
end

-- Why the site leaves the job to Slurm, or nil.
local function passes(job)
  if given(job.het_job_offset) then
    return SITE.heterogeneous == "pass" and "heterogeneous" or nil
  end
  return job.script == nil and SITE.interactive == "pass" and "interactive" or nil
end

-- The script calls the wrapper in some line that is not a comment.
local function calls_wrapper(script)
  for line in string.gmatch(script, "[^\r\n]+") do
    local code = string.gsub(" " .. line, "%s#.*$", "")
    local from = 1
    while true do
      local first, last = string.find(code, "synergy-srun", from, true)
      if not first then break end
      local before, after = string.sub(code, first - 1, first - 1), string.sub(code, last + 1, last + 1)
      if not string.match(before, "[%w_.-]") and not string.match(after, "[%w_.-]") then return true end
      from = last + 1
    end
  end
  return false
end

local function memory_per_node(job, gpus, cores)
  local per_gpu_mib = parse_gres(job.mem_per_tres)
  if per_gpu_mib then return per_gpu_mib * gpus end
  local per_cpu_mib = given_mib(job.min_mem_per_cpu)
  return given_mib(job.min_mem_per_node) or (per_cpu_mib and per_cpu_mib * math.max(1, cores)) or 0
end

-- What the user asks for on each node; 0 where he does not say. Changes nothing.
local function read_request(job)
  local asked, gpu_type = asked_gpus(job)
  local nodes = count_nodes(job, asked)
  local gpus = gpus_per_node(job, nodes, asked)
  local tasks = tasks_per_node(job, nodes, gpus)
  local per_task, per_gpu = given(job.cpus_per_task) or 0, parse_gres(job.cpus_per_tres)
  local cores = per_gpu and per_gpu * gpus or per_task * math.max(1, tasks)
  if per_gpu then per_task = math.max(1, math.floor(cores / math.max(1, tasks))) end
  local limit = given(job.time_limit) or 0
  local types, names
  if (job.features or "") ~= "" then types, names = types_of(job.features) end
  return { gpus = gpus, gpu_type = gpu_type, types = types, type_names = names, nodes = nodes,
    tasks = tasks, cpus_per_task = per_task, cores = cores,
    mem_mib = memory_per_node(job, gpus, math.max(cores, tasks)),
    limit_min = limit < NO_VAL and limit or 0 }
end

-- What Slurm forgets when the controller updates the job: the user's own request.
local function mark(request, script, elastic)
  local kind = request.gpu_type or "any"
  if not request.gpu_type and request.types then kind = table.concat(request.type_names, "+") end
  return string.format("%s,wrapper=%s,gpn=%d,type=%s,nodes=%d,tpn=%d,cpt=%d,mem=%.0f,limit=%d%s",
    MARK, calls_wrapper(script) and "yes" or "no", request.gpus, kind, request.nodes, request.tasks,
    request.cpus_per_task, request.mem_mib, request.limit_min, elastic and ",elastic=yes" or "")
end

-- The tasks of an elastic job as a total: a number per node could never be changed later.
local function free_tasks(job, request)
  if given(job.ntasks_per_node) then job.ntasks_per_node = NO_VAL16 end
  if request.tasks > 0 then job.num_tasks = request.tasks * request.nodes end
end

local REWRITTEN = {
  { field = "tres_per_job", option = "--gpus" },
  { field = "tres_per_task", option = "--gpus-per-task" },
  { field = "cpus_per_tres", option = "--cpus-per-gpu" },
  { field = "mem_per_tres", option = "--mem-per-gpu" },
}

-- The request in the one form that can be changed later on every release: GPUs per node.
local function rewrite(job, request)
  local prefix
  for _, form in ipairs(REWRITTEN) do
    local text = job[form.field] or ""
    if parse_gres(text) then
      prefix = string.match(text, "gres[:/]") or "gres:"
      local kept = {}
      for item in string.gmatch(text, "[^,]+") do
        if string.match(item, "^cpu[:=]") then kept[#kept + 1] = item end
      end
      job[form.field] = table.concat(kept, ",")
      if parse_gres(job[form.field]) then
        refuse("%s cannot be used in partition %s; use %s", form.option, SITE.partition,
          GPU_EXAMPLE)
      end
    end
  end
  if not prefix then return end
  job.tres_per_node = string.format("%sgpu:%s%d", prefix,
    request.gpu_type and request.gpu_type .. ":" or "", request.gpus)
  if request.tasks > 0 then job.num_tasks = request.tasks * request.nodes end
  if request.mem_mib > 0 and not given_mib(job.min_mem_per_cpu) then
    job.pn_min_memory = request.mem_mib
  end
end

-- srun reads these from the environment that sbatch captured, and they would contradict what the
-- controller gives; synergy-srun takes them away.
local function check_plain_srun(job)
  if calls_wrapper(job.script) then return end
  local instead = {
    cpus_per_tres = { "--cpus-per-gpu", "-c (CPUs per task), or leave it out" },
    mem_per_tres = { "--mem-per-gpu", "--mem (memory per node)" },
  }
  for field, words in pairs(instead) do
    if parse_gres(job[field]) then
      refuse("%s needs a script that starts its steps with synergy-srun, plain srun would fail "
        .. "with it; use %s", words[1], words[2])
    end
  end
end

-- For the launcher; what the user has set himself stays.
local function add_environment(job, hints)
  local environment = job.environment
  if environment == nil then return end
  -- Members of an array must not share one directory: theirs are made below it.
  local is_array = (job.array_inx or "") ~= ""
  local place = is_array and "SYNERGY_CHECKPOINT_ROOT" or "SYNERGY_CHECKPOINT_DIR"
  local ours = { SYNERGY_ENDPOINT = SITE.endpoint, [place] = hints.ckpt_dir }
  for name, value in pairs(ours) do
    if (environment[name] or "") == "" then environment[name] = value end
  end
  -- Tells synergy-srun that the tasks of the submission are not those of this run.
  if is_elastic(hints) then environment["SYNERGY_ELASTIC"] = "1" end
end

-- What others wrote stays, but nobody else makes marks.
local function leave_mark(job, facts)
  local before = string.gsub(job.admin_comment or "", "%s*synergy:%l+=%S*", "")
  job.admin_comment = before ~= "" and (before .. " " .. facts) or facts
end

local function admit(job)
  -- First of all: whatever happens below, the job is held and can be requeued.
  local asks_hold = job.priority == 0
  job.priority = 0
  job.requeue = 1
  if SITE_ERROR then
    refuse("partition %s takes no jobs now, its settings are broken; tell your administrator: %s",
      SITE.partition, SITE_ERROR)
  end
  if asks_hold then
    refuse("slurm-synergy holds and starts jobs of this partition itself; submit without --hold, "
      .. "or use --begin=TIME")
  end
  check_kind(job)
  refuse_other_gpu_forms(job)
  check_options(job)
  check_plain_srun(job)
  local request = read_request(job)
  local hints = read_hints(job.comment)
  check_supply(request, hints)
  check_elastic(request, hints, calls_wrapper(job.script))
  local facts = mark(request, job.script, is_elastic(hints))
  rewrite(job, request)
  if is_elastic(hints) then free_tasks(job, request) end
  job.min_nodes = request.nodes
  job.max_nodes = request.nodes
  leave_mark(job, facts)
  add_environment(job, hints)
  warn_of_idle_hints(hints)
end

-- For the modes that change nothing: the job runs as Slurm likes, and the mark tells the plans that
-- are only thought of what it asked for and whether it would obey a lease.
local function take_note(job)
  if job.script ~= nil then leave_mark(job, mark(read_request(job), job.script)) end
end

local function only_looks_on()
  return SITE.mode == "observe" or SITE.mode == "advise"
end

-- changes -------------------------------------------------------------------------------------

-- Everything that a plan decides, or that Slurm would take as a reason to start or move the job.
-- nice belongs here: on a held job it sets a positive priority, which releases it.
local FIXED_TEXT = {
  "partition", "reservation", "qos", "account", "features", "cluster_features", "req_nodes",
  "exc_nodes", "tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task",
  "cpus_per_tres", "mem_per_tres", "gres", "licenses", "burst_buffer",
  "admin_comment",
}
local FIXED_NUMBERS = {
  "min_cpus", "max_cpus", "cpus_per_task", "num_tasks", "min_nodes", "max_nodes",
  "ntasks_per_node", "ntasks_per_socket", "ntasks_per_core", "pn_min_cpus", "pn_min_tmp_disk",
  "sockets_per_node", "cores_per_socket", "threads_per_core", "contiguous", "shared", "requeue",
  "nice", "site_factor", "time_min", "req_switch", "reboot", "delay_boot",
}

-- The hints of a changed comment. Where checkpoints go is in the job's environment already.
local function check_new_hints(comment, record)
  local hints = read_hints(comment)
  local readable, before = pcall(read_hints, record.comment)
  if readable and before.ckpt_dir ~= hints.ckpt_dir then
    refuse("the hint ckpt_dir cannot be changed after submission; cancel the job and submit it "
      .. "anew")
  end
  if readable and is_elastic(hints) and not is_elastic(before) then
    refuse("a job cannot be made elastic after submission; cancel it and submit it anew")
  end
end

local function veto(job, record)
  if job.priority == 0 then
    refuse("slurm-synergy holds and starts jobs of partition %s itself; to keep one from running "
      .. "use scancel", SITE.partition)
  end
  if job.priority ~= nil and job.priority ~= NO_VAL then
    refuse("only the controller starts jobs of partition %s; to stop waiting use scancel",
      SITE.partition)
  end
  for _, field in ipairs(FIXED_TEXT) do
    -- An empty text is a change too: Reservation= takes the job out of it.
    if job[field] ~= nil then
      refuse("%s of a job in partition %s cannot be changed; cancel it and submit it anew",
        field, SITE.partition)
    end
  end
  for _, field in ipairs(FIXED_NUMBERS) do
    if given(job[field]) then
      refuse("%s of a job in partition %s cannot be changed; cancel it and submit it anew",
        field, SITE.partition)
    end
  end
  if given_mib(job.min_mem_per_node) or given_mib(job.min_mem_per_cpu)
    or (job.pn_min_memory ~= nil and job.pn_min_memory < NO_VAL64) then
    refuse("the memory of a job in partition %s cannot be changed; cancel it and submit it anew",
      SITE.partition)
  end
  -- ArrayTaskThrottle= arrives here as a bare number.
  if job.array_inx ~= nil and not string.match(job.array_inx, "^%%?%d+$") then
    refuse("the members of an array in partition %s cannot be changed; cancel it and submit it "
      .. "anew", SITE.partition)
  end
  local limit = job.time_limit
  if limit ~= nil and limit ~= NO_VAL and limit > (record.time_limit or 0) then
    refuse("the time limit of a job in partition %s can only be lowered", SITE.partition)
  end
  if job.comment ~= nil then check_new_hints(job.comment, record) end
end

-- what Slurm calls ----------------------------------------------------------------------------

local function tell(problem, what)
  if type(problem) == "table" and problem.refusal then
    pcall(slurm.log_user, "slurm-synergy: %s", problem.refusal)
  else
    pcall(slurm.log_error, "slurm-synergy: %s: %s", what, tostring(problem))
    pcall(slurm.log_user, "slurm-synergy: internal error, the job is refused; tell your "
      .. "administrator: %s", tostring(problem))
  end
  return slurm.ERROR
end

local function wants_managed(job, part_list)
  return is_managed(job.partition, part_list)
end

local function is_managed_record(record)
  local marks = record.admin_comment or ""
  if string.find(marks, "synergy:pass=", 1, true) then return false end
  return (record.partition ~= nil and names_managed(record.partition))
    -- The mark stays on a job that somebody moved to another partition.
    or string.find(marks, "synergy:v=", 1, true) ~= nil
end

function slurm_job_submit(job_desc, part_list, submit_uid)
  local known, managed = pcall(wants_managed, job_desc, part_list)
  if known and not managed then return slurm.SUCCESS end
  if only_looks_on() then
    pcall(take_note, job_desc)
    return slurm.SUCCESS
  end
  if not known then
    local readable, partition = pcall(function() return job_desc.partition end)
    local mentions = readable and type(partition) == "string"
      and string.find(partition, SITE.partition, 1, true)
    if not mentions then return slurm.SUCCESS end
    return tell(managed, "finding out whether a job is managed")
  end
  local passed = pcall(function()
    local kind = passes(job_desc)
    if SITE_ERROR or not kind then error("not passed") end
    leave_mark(job_desc, "synergy:pass=" .. kind)
  end)
  if passed then return slurm.SUCCESS end
  local admitted, problem = pcall(admit, job_desc)
  if admitted then return slurm.SUCCESS end
  return tell(problem, "admission")
end

-- Here an error before the job is known to be somebody else's refuses the change, which harms
-- nobody: the job stays as it is.
function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
  local allowed, problem = pcall(function()
    if is_operator(modify_uid) or only_looks_on() then return end
    if is_managed_record(job_rec) then
      veto(job_desc, job_rec)
    elseif job_desc.partition ~= nil and names_managed(job_desc.partition) then
      refuse("a job cannot be moved into partition %s; cancel it and submit it with -p %s",
        SITE.partition, SITE.partition)
    end
  end)
  if allowed then return slurm.SUCCESS end
  return tell(problem, "change of a job")
end

return slurm.SUCCESS
