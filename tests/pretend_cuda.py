"""
Run a script of a project as if there were one CUDA card, on a CPU build of torch: real values, eager CUDA's rules.

    python pretend_cuda.py train.py --use_grpo --max_steps 2         installs itself, then runs the script with runpy
    python pretend_cuda.py -m pytest -q tests/test_gpu.py            a module; child processes of Python pretend as well
    PRETEND_MEMORY_GB=24     memory that mem_get_info and get_device_properties report (default 80)
    PRETEND_CC=90            compute capability; 75: no bfloat16, no flash attention
    PRETEND_TRACK_MEMORY=1   count live bytes of pretended tensors, for max_memory_allocated (slower)
    PRETEND_ROOT=DIR         folder whose lines are named in the tables (default: that of the script)
    PRETEND_REPORT=FILE      also write the tables to a file (children: FILE.<pid>); PRETEND_QUIET=1: not to stderr
    PRETEND_STRICT=0         record errors of device and dtype, but go on (default: raise, as CUDA does)
    PRETEND_LAUNCHES=40      also the 40 lines and the 40 operations with most launches
    The table names errors that the program caught as well: a check that falls back to another path hides them.

How: a tensor subclass that claims device cuda:0 and holds a CPU tensor; a TorchDispatchMode for factories. Every ATen
operation below autograd comes here: devices of its arguments are compared, it is computed by the CPU's kernel, its
results are wrapped. Two C++ tables of a CPU build are changed in memory (ctypes, x86-64 and aarch64): CUDA's device
guard becomes torch's own no-op guard, and CUDAHooksInterface says that there is a device. So autograd runs backward
passes in a thread of the device, as on a card, and autocast, torch.accelerator and `is_cuda` work as there.

What it can tell
  - operations that mix devices (error as on CUDA, with the Python stack): all tensors on one device; a 0-dim CPU tensor
    is allowed in pointwise operations; CPU indices may index a CUDA tensor, CUDA indices no CPU tensor; copies may cross;
  - operations without a CUDA kernel for a dtype, of those known here (integer matrix products, unsigned integers);
  - host synchronisations: item/bool/float, device to host, host to device (of pageable memory: CUDA waits there as well),
    nonzero, boolean indices, masked_select, unique, equal, repeat_interleave of a tensor, ... with file:line and count;
  - launches: operations that are no views, a lower bound of kernels: per decoded token, pass, optimiser step;
  - arguments of the flash and memory-efficient attention kernels, forward and backward, by the checks of their C++
    (dtype, head size, strides, log-sum-exp, layout of `out`), with values from the CPU's flash kernel;
  - results: float32 runs must agree with the CPU's to rounding; bfloat16 values come from CPU bfloat16 kernels.
What it cannot tell
  - speed, real memory and fragmentation, races and non-determinism (atomics), asynchronous errors, TF32 and reduction
    order, values of CUDA kernels, cuBLAS/cuDNN/NCCL, Triton, torch.compile, CUDA graphs, pinned and non_blocking copies,
    fork after CUDA's start, kernels launched inside one operation (a sort is one operation here and several kernels).
  - several processes: a child pretends by PYTHONPATH, which a test may replace; there is no NCCL;
  - where a tensor is held elsewhere, Module.to makes new Parameters (a note says so); on CUDA they are the same objects;
  - hosts: peak memory is 0 without PRETEND_TRACK_MEMORY; the lists of operations here are by reading, not exhaustive;
  - scaled_dot_product_attention is replaced by its flash (16 bits, no mask) or memory-efficient branch: the real
    choice, also of cuDNN, is made in C++ that a CPU build lacks.
"""

import atexit
import ctypes
import mmap
import os
import platform
import runpy
import sys
import threading
import traceback
import types
from collections import Counter

SELF = os.path.abspath(__file__)
STRICT = os.environ.get("PRETEND_STRICT", "1") != "0"
MEMORY = int(float(os.environ.get("PRETEND_MEMORY_GB", "80")) * 1e9)
CC = int(os.environ.get("PRETEND_CC", "90"))
TRACK = os.environ.get("PRETEND_TRACK_MEMORY", "") == "1"


def install():
    import torch

    if getattr(torch, "_pretends_cuda", False):
        return
    torch._pretends_cuda = True
    patch_cpp(torch)
    patch_python(torch)
    define(torch)


# ---- C++: guard and hooks ----------------------------------------------------------------------------------

KEEP = []                       # memory that C++ points into


def constant_function(value):
    """Return the address of a machine-code function that returns a small integer."""
    if platform.machine() in ("x86_64", "AMD64"):
        code = b"\xb8" + value.to_bytes(4, "little") + b"\xc3"
    else:
        code = (0x52800000 | value << 5).to_bytes(4, "little") + b"\xc0\x03\x5f\xd6"
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(code)
    KEEP.append(memory)
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def patch_cpp(torch):
    zero, one, libs = constant_function(0), constant_function(1), torch.__path__[0] + "/lib/"
    # _ensureCUDADeviceGuardSet replaces a guard that counts 0 devices by torch's no-op guard; a CPU build has none.
    registry = (ctypes.c_void_p * 2).in_dll(
        ctypes.CDLL(libs + "libc10.so"), "_ZN3c104impl26device_guard_impl_registryE")
    table = (ctypes.c_void_p * 64)(*[zero] * 64)
    fake = (ctypes.c_void_p * 4)(ctypes.addressof(table), 0, 0, 0)
    KEEP.extend([table, fake])
    registry[1] = ctypes.addressof(fake)
    torch._C._ensureCUDADeviceGuardSet()
    assert registry[1] != ctypes.addressof(fake), "no guard was set"
    # CUDAHooksInterface: a copy of its table of virtual functions, with other answers (order: AcceleratorHooksInterface.h).
    get_hooks = ctypes.CDLL(libs + "libtorch_cpu.so")["_ZN2at6detail12getCUDAHooksEv"]
    get_hooks.restype = ctypes.c_void_p
    hooks = ctypes.cast(get_hooks(), ctypes.POINTER(ctypes.c_void_p))
    old = ctypes.cast(hooks[0], ctypes.POINTER(ctypes.c_void_p))
    new = (ctypes.c_void_p * 82)(*[old[i] for i in range(-2, 80)])
    for index in 2, 3, 4, 6, 16:          # isBuilt, isAvailable, hasPrimaryContext, deviceCount, hasCUDA
        new[2 + index] = one
    for index in 5, 7, 8, 9, 10, 11:      # init, set/get/exchange/maybeExchange device, isPinnedPtr
        new[2 + index] = zero
    KEEP.append(new)
    hooks[0] = ctypes.addressof(new) + 16
    for kept in KEEP:                     # for ever: C++ uses it until the process has ended
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    found = torch._C._accelerator_getAccelerator()
    assert found is not None and found.type == "cuda", "another torch: the order of CUDAHooksInterface has changed"


# ---- Python: torch.cuda and torch.accelerator --------------------------------------------------------------


class Memory:
    now = peak = 0
    live: dict = {}                                       # noqa: RUF012


def patch_python(torch):
    cuda, accelerator = torch.cuda, torch.accelerator
    generator = torch.Generator()
    properties = types.SimpleNamespace(
        name="pretended card", major=CC // 10, minor=CC % 10, total_memory=MEMORY, multi_processor_count=132,
        warp_size=32, gcnArchName="", shared_memory_per_block_optin=232448, uuid="pretended")
    device, free = torch.device("cuda", 0), lambda *_, **__: (MEMORY - Memory.now, MEMORY)
    none, yes, index = (lambda *_, **__: None), (lambda *_, **__: True), (lambda *_, **__: 0)
    for name, value in {
        "_lazy_init": none, "init": none, "is_available": yes, "is_initialized": yes, "_initialized": True,
        "device_count": lambda: 1, "current_device": index, "set_device": none, "synchronize": note_synchronize,
        "get_device_properties": lambda *_: properties, "get_device_name": lambda *_: properties.name,
        "get_device_capability": lambda *_: (CC // 10, CC % 10), "mem_get_info": free, "empty_cache": none,
        "memory_allocated": lambda *_: Memory.now, "max_memory_allocated": lambda *_: Memory.peak,
        "memory_reserved": lambda *_: Memory.now, "max_memory_reserved": lambda *_: Memory.peak,
        "reset_peak_memory_stats": none, "memory_stats": lambda *_: {}, "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda including_emulation=True: CC >= 80 or including_emulation,
        "get_rng_state": lambda *_: generator.get_state(), "set_rng_state": lambda state, *_: set_state(state),
        "get_rng_state_all": lambda: [generator.get_state()], "set_rng_state_all": lambda s: set_state(s[0]),
        "manual_seed": lambda seed: generator.manual_seed(int(seed)), "initial_seed": generator.initial_seed,
        "manual_seed_all": lambda seed: generator.manual_seed(int(seed)), "_is_in_bad_fork": lambda: False,
        "default_generators": (generator,), "is_tf32_supported": lambda: CC >= 80, "get_arch_list": lambda: [f"sm_{CC}"],
    }.items():
        setattr(cuda, name, own(value))

    def set_state(state):
        if not isinstance(state, torch.Tensor) or state.device.type != "cpu" or state.dtype != torch.uint8:
            raise TypeError("RNG state must be a torch.ByteTensor")          # as on a card
        generator.set_state(state)

    for name, value in {
        "current_accelerator": lambda check_available=False: device.__class__("cuda"), "is_available": yes,
        "device_count": lambda: 1, "current_device_index": index, "current_device_idx": index, "set_device_index": none,
        "set_device_idx": none, "synchronize": note_synchronize, "empty_cache": none,
        "memory_allocated": lambda *_: Memory.now, "max_memory_allocated": lambda *_: Memory.peak,
        "memory_reserved": lambda *_: Memory.now, "max_memory_reserved": lambda *_: Memory.peak,
        "reset_peak_memory_stats": none, "get_memory_info": free, "memory_stats": lambda *_: {},
    }.items():
        if hasattr(accelerator, name):
            setattr(accelerator, name, own(value))
    torch.backends.cuda.is_built = own(yes)
    future = torch.__future__
    future.set_swap_module_params_on_conversion(True)     # parameters stay the same objects, as on CUDA
    original = torch.nn.Module._apply

    def _apply(self, fn, recurse=True):
        try:
            return original(self, fn, recurse)
        except RuntimeError as error:                     # something else holds the tensor: new Parameters instead
            if "Couldn't swap" not in str(error):
                raise
            NOTES["harness: Module.to made new Parameters, where CUDA keeps the objects"] += 1
            future.set_swap_module_params_on_conversion(False)
            future.set_overwrite_module_params_on_conversion(True)
            try:
                return original(self, fn, recurse)
            finally:
                future.set_overwrite_module_params_on_conversion(False)
                future.set_swap_module_params_on_conversion(True)

    torch.nn.Module._apply = _apply


def own(value):
    """Return a function of its own: torch._dynamo wants no function under two names."""
    return (lambda *args, **kwargs: value(*args, **kwargs)) if callable(value) else value


def note_synchronize(*_, **__):
    record("synchronize()", 0)


# ---- records -----------------------------------------------------------------------------------------------

SYNCS = Counter()               # (kind, place, region) -> times
SYNC_BYTES = Counter()
LAUNCHES = Counter()            # region -> operations
LAUNCH_PLACES = Counter()       # (region, place) -> operations
LAUNCH_NAMES = Counter()        # (region, name) -> operations
UNITS = Counter()               # region -> tokens, passes, steps
ERRORS = {}                     # (kind, name, place) -> [times, stack]
NOTES = Counter()
MAIN = threading.main_thread().ident

# What is counted for itself: the first entry whose function is in the stack. Functions of this project.
REGIONS = [
    ("runs/startup_check.py", "refuse_wrong_sampler", "start-up check"), ("runs/startup_check.py", "choose_engine", "start-up check"),
    ("engine/sampler.py", "prefill", "shared: prefill"),
    ("engine/sampler.py", "decode", "shared: decode"), ("engine/sampler.py", "sample_sharing_prompts", "shared: around"),
    ("sample.py", "sample_batch", "plain: sample_batch"), ("train.py", "optimizer_step", "optimiser step"),
    ("train.py", "accumulate_gradients", "training pass"), ("experience.py", "log_probs_of_rollout", "pass without gradient"),
    ("train.py", "grpo_training_step", "step: the rest"), ("runs/checkpoint.py", "write_checkpoint", "checkpoint"),
]
UNIT_OF = [  # (module, class or "", function, region or "", name of the unit): its calls are the units of the current region
    ("engine.cache", "PrefixCache", "forward"), ("engine.cache", "PrefixCache", "add_prompts"), ("sample", "", "next_logits"),
    ("engine.shared", "Shared", "log_probs"), ("engine.plain", "Engine", "log_probs"),
]
ROOT = None
PATCHED = set()


def place_and_region():
    """Return the innermost line of the project in the stack, and the region. In autograd's thread: of the main thread."""
    frame, place, library, seen = sys._getframe(2), None, "", set()
    elsewhere = threading.get_ident() != MAIN
    for start in (frame, sys._current_frames().get(MAIN) if elsewhere else None):
        while start is not None:
            code = start.f_code
            name = code.co_filename
            if name.startswith(ROOT) and name != SELF:
                short = name[len(ROOT):]
                if place is None:
                    place = f"{short}:{start.f_lineno}"
                    if elsewhere and not seen:
                        place += " (backward)" if code.co_name != "backward" else ""
                seen.add((short, code.co_name))
            elif place is None and not library and "site-packages/" in name and "/torch/" not in name:
                library = f" < {name.rpartition('site-packages/')[2]}:{start.f_lineno}"
            start = start.f_back
    region = next((label for file, function, label in REGIONS if (file, function) in seen), "other")
    if region == "training pass" and elsewhere:
        region = "training pass, backward"
    return (place or "outside the project") + library, region


def record(kind, size):
    place, region = place_and_region()
    SYNCS[kind, place, region] += 1
    SYNC_BYTES[kind, place, region] += size


def count_units():
    """Wrap the functions of UNIT_OF as their modules appear."""
    for entry in UNIT_OF:
        if entry in PATCHED or entry[0] not in sys.modules:
            continue
        owner = sys.modules[entry[0]]
        owner = getattr(owner, entry[1], None) if entry[1] else owner
        if owner is None or not hasattr(owner, entry[2]):
            continue
        PATCHED.add(entry)

        original = getattr(owner, entry[2])

        def wrapped(*args, _original=original, **kwargs):
            _, region = place_and_region()
            UNITS[region] += 1
            return _original(*args, **kwargs)

        setattr(owner, entry[2], wrapped)


def fault(kind, func, message, error=RuntimeError):
    place, _ = place_and_region()
    key = kind, str(func), place
    if key not in ERRORS:
        ERRORS[key] = [0, message, "".join(traceback.format_stack(limit=40)[:-2])]
    ERRORS[key][0] += 1
    if STRICT:
        raise error(f"pretended CUDA: {func}: {message} at {place}")


# ---- the tensor and the mode -------------------------------------------------------------------------------


def define(torch):
    global CudaTensor, dispatch, Mode
    from torch.utils._python_dispatch import TorchDispatchMode

    aten, CPU, CUDA = torch.ops.aten, torch.device("cpu"), torch.device("cuda", 0)
    Tensor = torch.Tensor

    def refuse_numpy(self, *_, **__):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first.")

    class CudaTensor(Tensor):
        """Claims to be on cuda:0, and holds a CPU tensor."""

        __torch_function__ = torch._C._disabled_torch_function_impl
        elem: Tensor

        @staticmethod
        def __new__(cls, elem):
            self = Tensor._make_wrapper_subclass(
                cls, elem.size(), strides=elem.stride(), storage_offset=elem.storage_offset(), dtype=elem.dtype,
                layout=elem.layout, device=CUDA, requires_grad=False)
            self.elem = elem
            if TRACK:
                track(elem)
            return self

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return dispatch(func, args, kwargs or {})

        def __deepcopy__(self, memo):
            if id(self) in memo:
                return memo[id(self)]
            new = CudaTensor(self.elem.clone(memory_format=torch.preserve_format))
            if getattr(self, "_is_param", False):
                new = torch.nn.Parameter(new, self.requires_grad)
            elif self.requires_grad:
                new.requires_grad_()
            new.__dict__.update({k: v for k, v in self.__dict__.items() if k not in ("elem", "_is_param")})
            memo[id(self)] = new
            return new

        def __reduce_ex__(self, protocol):                # saved as a CPU tensor; a card's storage is tagged cuda:0
            record("save (device to host)", self.elem.nbytes)
            plain = self.elem.detach()
            if getattr(self, "_is_param", False):
                plain = torch.nn.Parameter(plain, self.requires_grad)
            return plain.__reduce_ex__(protocol)

        numpy = refuse_numpy
        __array__ = refuse_numpy

        @property
        def data(self):
            return self.detach()

        @data.setter
        def data(self, new):
            assert isinstance(new, CudaTensor) and new.shape == self.shape and new.dtype == self.dtype, "harness: .data ="
            self.elem = new.elem

        def tolist(self):
            return self.cpu().tolist()

        def data_ptr(self):
            return self.elem.data_ptr()

        def untyped_storage(self):
            return self.elem.untyped_storage()

        def storage(self):
            return self.elem.storage()

        def __repr__(self, **_):
            return f"{self.elem!r} (pretended cuda:0)"

        def __format__(self, spec):
            return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    def track(elem):
        import weakref

        storage = elem.untyped_storage()
        key = storage._cdata
        if key not in Memory.live:
            size = -(-storage.nbytes() // 512) * 512
            Memory.live[key] = size
            Memory.now += size
            Memory.peak = max(Memory.peak, Memory.now)
            weakref.finalize(storage, forget, key)

    def forget(key):
        Memory.now -= Memory.live.pop(key, 0)

    # -- what is known of operations

    views = {}

    def is_view(func):
        if func not in views:
            views[func] = any(
                r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        return views[func]

    NO_KERNEL = {
        "aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided",
        "aten::detach", "aten::alias", "aten::lift_fresh", "aten::_unsafe_view", "aten::_local_scalar_dense", "aten::set_",
        "aten::resize_", "aten::_reshape_alias", "aten::is_same_size", "aten::detach_", "aten::record_stream",
    }
    SYNCING = {                  # kinds of synchronisation by operation
        "aten::_local_scalar_dense": "item", "aten::nonzero": "nonzero", "aten::masked_select": "masked_select",
        "aten::unique_consecutive": "unique", "aten::_unique2": "unique", "aten::unique_dim": "unique",
        "aten::equal": "equal", "aten::repeat_interleave": "repeat_interleave(tensor)", "aten::bincount": "bincount",
        "aten::is_nonzero": "item", "aten::masked_scatter_backward": "masked_select (backward of masked_scatter)",
        "aten::nonzero_static": None, "aten::_linalg_check_errors": "linalg",
    }
    ZERO_DIM_ON_CPU = {          # not tagged pointwise, but a 0-dim CPU tensor is allowed
        "aten::where", "aten::masked_fill", "aten::masked_fill_", "aten::fill", "aten::fill_", "aten::copy_",
        "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_foreach_mul_", "aten::_foreach_mul",
        "aten::_foreach_div_", "aten::_foreach_add_", "aten::lerp", "aten::lerp_", "aten::index_fill", "aten::index_fill_",
        "aten::_scaled_dot_product_efficient_attention_backward", "aten::_scaled_dot_product_flash_attention_backward",
    }
    MATRIX = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::addmv", "aten::dot", "aten::addbmm",
              "aten::addmm_", "aten::baddbmm_", "aten::mv", "aten::vdot", "aten::linear"}
    COPY = {"aten::_to_copy", "aten::copy_", "aten::copy"}
    UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}
    UNSIGNED_OK = {"aten::fill_", "aten::zero_", "aten::zeros", "aten::full", "aten::_to_copy", "aten::copy_", "aten::clone"}

    def dispatch(func, args, kwargs):
        name = func._schema.name
        cuda, cpu, back = [], [], {}

        def unwrap(x):
            if isinstance(x, CudaTensor):
                cuda.append(x)
                back[id(x.elem)] = x
                return x.elem
            if isinstance(x, Tensor):
                (cpu if x.device.type == "cpu" else []).append(x)
                return x
            if isinstance(x, (list, tuple)):
                return type(x)(map(unwrap, x)) if not hasattr(x, "_fields") else type(x)(*map(unwrap, x))
            return x

        inner = [unwrap(x) for x in args]
        inner_kw = {key: unwrap(x) for key, x in kwargs.items()} if kwargs else {}
        wanted = inner_kw.get("device")
        wanted = torch.device(wanted).type if wanted is not None else None
        if not cuda and wanted != "cuda":
            return func(*args, **kwargs)
        if len(PATCHED) < len(UNIT_OF):
            count_units()
        if wanted == "cuda":
            inner_kw["device"] = CPU
        if name in COPY:
            return copy(func, name, args, inner, inner_kw, cuda, cpu, wanted, back)
        check(func, name, args, cuda, cpu)
        synchronises(func, name, args, inner)
        if not is_view(func) and name not in NO_KERNEL:
            place, region = place_and_region()
            LAUNCHES[region] += 1
            LAUNCH_PLACES[region, place] += 1
            LAUNCH_NAMES[region, name] += 1
        special = SPECIAL.get(name)
        out = special(*inner, **inner_kw) if special else func(*inner, **inner_kw)
        for wrapper in cuda:
            if wrapper.elem.shape != wrapper.shape or wrapper.elem.stride() != wrapper.stride():
                raise NotImplementedError(f"harness: {func} changes the shape of its argument in place")
        on_cpu = wanted == "cpu" and not name.endswith("_like")
        return wrap(out, back, on_cpu or (wanted is not None and wanted != "cuda"))

    def wrap(out, back, plain=False):
        if isinstance(out, Tensor):
            return back.get(id(out)) if id(out) in back else out if plain else CudaTensor(out)
        if isinstance(out, (list, tuple)):
            return type(out)(wrap(x, back, plain) for x in out)
        return out

    def copy(func, name, args, inner, inner_kw, cuda, cpu, wanted, back):
        if name == "aten::_to_copy":
            source = args[0]
            was_cuda = isinstance(source, CudaTensor)
            to_cuda = wanted == "cuda" or (wanted is None and was_cuda)
            if wanted == "meta":
                return func(*inner, **inner_kw)
            if was_cuda != to_cuda:
                record("device to host" if was_cuda else "host to device", inner[0].nbytes)
            else:
                launch(name)
            out = func(*inner, **inner_kw)
            return CudaTensor(out) if to_cuda else out
        target, source = args[0], args[1]
        if isinstance(target, CudaTensor) != isinstance(source, CudaTensor):
            if isinstance(target, CudaTensor) and source.dim() == 0 and source.numel() == 1 and target.dim() == 0:
                record("host to device", source.nbytes)
            else:
                record("host to device" if isinstance(target, CudaTensor) else "device to host", inner[1].nbytes)
        else:
            launch(name)
        out = func(*inner, **inner_kw)
        return back[id(out)] if id(out) in back else target if out is target else CudaTensor(out)

    def launch(name):
        place, region = place_and_region()
        LAUNCHES[region] += 1
        LAUNCH_PLACES[region, place] += 1
        LAUNCH_NAMES[region, name] += 1

    def check(func, name, args, cuda, cpu):
        """Compare devices and dtypes, as the CUDA kernels do."""
        if name in ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_", "aten::_unsafe_index"):
            target, indices = args[0], [i for i in args[1] if isinstance(i, Tensor)]
            if not isinstance(target, CudaTensor) and any(isinstance(i, CudaTensor) for i in indices):
                fault("device", func, "indices should be either on cpu or on the same device as the indexed tensor (cpu)")
            for i in indices:
                if isinstance(target, CudaTensor) and not isinstance(i, CudaTensor):
                    record("host to device (index)", i.nbytes)
            if len(args) > 2:
                values = args[2]
                if isinstance(target, CudaTensor) != isinstance(values, CudaTensor):
                    if values.dim() == 0 and isinstance(target, CudaTensor):
                        record("host to device", values.nbytes)
                    else:
                        fault("device", func, f"expected values on {target.device}, found {values.device}")
            return
        if cuda:
            for x in cpu:
                if x.dim() > 0:
                    fault("device", func, "Expected all tensors to be on the same device, but found at least two devices, "
                          f"cuda:0 and cpu (a CPU tensor of shape {tuple(x.shape)})")
                elif name not in ZERO_DIM_ON_CPU and torch.Tag.pointwise not in func.tags:
                    fault("device", func, "a 0-dim CPU tensor in an operation that is not pointwise")
        first = cuda[0] if cuda else None
        if name in MATRIX and first is not None and not (first.is_floating_point() or first.is_complex()):
            fault("dtype", func, f"not implemented for {first.dtype} on CUDA")
        if name not in UNSIGNED_OK and any(x.dtype in UNSIGNED for x in cuda) and "attention" not in name and not is_view(func):
            NOTES[f"{name} of unsigned integers: does CUDA have it?"] += 1

    def synchronises(func, name, args, inner):
        kind = SYNCING.get(name)
        if kind:
            record(kind, 0)
        elif (name == "aten::index" and any(
            isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in inner[1]
        )) or (name in ("aten::index_put_", "aten::_index_put_impl_", "aten::index_put") and any(
            isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in inner[1]
        ) and inner[2].numel() != 1):
            record("boolean index", 0)

    # -- attention kernels: checks of flash_api.cpp and attention(_backward).cu, values of the CPU's flash kernel

    def require(condition, what, message):
        if not condition:
            fault("kernel", what, message)

    def check_flash(what, q, k, v, *more):
        require(CC >= 80, what, "FlashAttention only supports Ampere GPUs or newer.")
        require(q.dtype in (torch.float16, torch.bfloat16), what, "FlashAttention only support fp16 and bf16 data type")
        for x in (k, v, *more):
            require(x.dtype == q.dtype, what, f"dtypes differ: {x.dtype}, query {q.dtype}")
        for x in (q, k, v, *more):
            require(x.dim() == 4 and x.stride(-1) == 1, what, "Input tensor must have contiguous last dimension")
        require(q.shape[-1] % 8 == 0, what, f"head_size must be a multiple of 8: {q.shape[-1]}")
        require(q.shape[-1] <= 256 and q.shape[-1] == k.shape[-1] == v.shape[-1], what, "head sizes")
        require(q.shape[1] % k.shape[1] == 0 and k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0], what, "shapes")

    def cpu_flash(q, k, v, mask, causal, scale):
        n = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(n, dim=1) if n > 1 else x for x in (k, v))
        if q.shape[-1] != v.shape[-1] or q.dim() != 4:
            raise NotImplementedError("harness: head sizes differ")
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)

    def like(x, model):
        return torch.empty_like(model).copy_(x) if x.stride() != model.stride() and x.shape == model.shape else x

    def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
        check_flash("_scaled_dot_product_flash_attention", q, k, v)
        out, lse = cpu_flash(q, k, v, None, is_causal, scale)
        state = torch.zeros(2, dtype=torch.uint64)
        return (like(out, q), lse.float().contiguous(), None, None, q.shape[2], k.shape[2], state,
                torch.zeros((), dtype=torch.uint64), torch.empty(0, dtype=q.dtype))

    def flash_backward(grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale=None):
        what = "_scaled_dot_product_flash_attention_backward"
        check_flash(what, q, k, v, out, grad)
        require(lse.dtype == torch.float32 and lse.is_contiguous() and tuple(lse.shape) == tuple(q.shape[:3]), what,
                f"logsumexp is read as contiguous float32 (B, H, n), found {lse.dtype} {tuple(lse.shape)} {lse.stride()}")
        require(cum_q is None and (max_q, max_k) == (q.shape[2], k.shape[2]), what, "max_q, max_k")
        require(not is_causal or q.shape[2] == k.shape[2], what, "causal with other lengths: bottom right aligned")
        n = q.shape[1] // k.shape[1]
        wide_k, wide_v = (x.repeat_interleave(n, dim=1) if n > 1 else x for x in (k, v))
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, wide_k, wide_v, out, lse, 0.0, is_causal, attn_mask=None, scale=scale)
        dq, dk, dv = grads
        if n > 1:
            dk, dv = (x.unflatten(1, (-1, n)).sum(2) for x in (dk, dv))
        return dq, dk, dv

    def efficient(q, k, v, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
        what = "_scaled_dot_product_efficient_attention"
        check_efficient(what, q, k, v)
        if bias is not None:
            require(bias.dtype == q.dtype, what, "invalid dtype for bias - should match query's dtype")
            require(tuple(bias.shape) == (*q.shape[:3], k.shape[2]), what, "attn_bias: wrong shape")
        out, lse = cpu_flash(q, k, v, bias, is_causal, scale)
        rounded = -(-q.shape[2] // 32) * 32 if compute_log_sumexp else 0
        padded = torch.full((*q.shape[:2], rounded), torch.inf)
        if rounded:
            padded[:, :, : q.shape[2]] = lse
        out = out.transpose(1, 2).contiguous().transpose(1, 2)               # BMHK memory, as the kernel's
        return out, padded, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)

    def check_efficient(what, q, k, v, *more):
        for x in (q, k, v, *more):
            require(x.dim() == 4 and x.stride(-1) == 1 and x.dtype == q.dtype, what, "last dimension or dtype")
        require(q.dtype in (torch.float32, torch.float16, torch.bfloat16), what, f"dtype {q.dtype}")
        require(q.shape[1] == k.shape[1] == v.shape[1], what, "Num heads")
        align = 8 if q.dtype != torch.float32 else 4
        if CC >= 80 and any(x.stride(1) % align or x.shape[-1] % align for x in (q, k, v)):
            NOTES[f"{what}: head size or stride no multiple of {align}: 'no kernel found to launch' is possible"] += 1
        require(q.shape[0] <= 65535 or not more, what, "more than 65535 rows: in chunks")

    def efficient_backward(grad, q, k, v, bias, out, lse, seed, offset, dropout_p, mask, is_causal=False, *, scale=None):
        what = "_scaled_dot_product_efficient_attention_backward"
        check_efficient(what, q, k, v, out, grad)
        rounded = -(-q.shape[2] // 32) * 32
        require(lse.dtype == torch.float32 and lse.shape[2] >= rounded and lse.stride(2) == 1, what,
                f"logsumexp must be float32, padded to a multiple of 32: {tuple(lse.shape)}")
        beyond = lse[:, :, q.shape[2]:]
        if beyond.numel() and not beyond.isposinf().all():
            NOTES[f"{what}: logsumexp padded with {float(beyond.flatten()[0])}, CUDA's forward pads with inf"] += 1
        # The kernel assumes that `out` is (B, n, H, D) in memory: o_strideM is H * D, whatever the tensor says. It reads
        # `out` itself only in 16 bits; in float32 ATen computes delta from the tensor.
        if out.shape[2] > 1 and out.stride(2) != out.shape[1] * out.shape[3]:
            text = f"out has stride {out.stride(2)} between queries, the kernel assumes {out.shape[1] * out.shape[3]}"
            if q.dtype == torch.float32:
                NOTES[f"{what}: {text} (float32: harmless)"] += 1
            else:
                fault("kernel", what, text)
        wanted = list(mask)
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse[:, :, : q.shape[2]].contiguous(), 0.0, is_causal,
            attn_mask=bias, scale=scale)
        return (*(g if w else None for g, w in zip(grads, wanted)), None)

    def no_fused_choice(*_, **__):
        return 0

    def histc(x, bins=100, min=0, max=0):                 # CUDA has it for integers
        return aten.histc(x.float(), bins, min, max).to(x.dtype)

    def grouped_mm(a, b, offs=None, bias=None, out_dtype=None):
        what = "_grouped_mm"
        for x in a, b:
            align, (rows, columns) = 16 // x.element_size(), (x.stride(-2), x.stride(-1))
            other = columns if rows == 1 and columns != 1 else rows
            require(1 in (rows, columns) and other % align == 0, what, "strides should be multiple of 16 bytes")
        require(a.dtype == b.dtype and (offs is None or offs.dtype == torch.int32), what, "dtypes")
        if a.dtype != torch.bfloat16 and offs is not None:
            NOTES[f"{what} in {a.dtype}: CUDA copies the offsets to the host and launches a product for each expert"] += 1
            record("device to host (_grouped_mm, not bfloat16)", offs.nbytes)
        return aten._grouped_mm(a, b, offs, bias, out_dtype)

    SPECIAL = {
        "aten::_scaled_dot_product_flash_attention": flash,
        "aten::_scaled_dot_product_flash_attention_backward": flash_backward,
        "aten::_scaled_dot_product_efficient_attention": efficient,
        "aten::_scaled_dot_product_efficient_attention_backward": efficient_backward,
        "aten::_fused_sdp_choice": no_fused_choice, "aten::histc": histc, "aten::_grouped_mm": grouped_mm,
    }

    class PretendMode(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls):
            return True

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return dispatch(func, args, kwargs or {})

    original = torch.nn.functional.scaled_dot_product_attention

    def scaled_dot_product_attention(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        if not isinstance(query, CudaTensor):
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if torch.is_autocast_enabled("cuda"):             # in the list of operations that autocast rounds for
            dtype = torch.get_autocast_dtype("cuda")
            query, key, value = (x.to(dtype) if x.is_floating_point() else x for x in (query, key, value))
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(dtype)
        with torch.autocast("cuda", enabled=False):
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            half, size = query.dtype != torch.float32, query.shape[-1]
            if half and attn_mask is None and size <= 256 and CC >= 80 and value.shape[-1] == size:
                padded = [torch.nn.functional.pad(x, (0, -size % 8)) if size % 8 else x for x in (query, key, value)]
                return aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)[0][..., :size]
            groups = query.shape[1] // key.shape[1]
            if groups > 1:
                key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
            if attn_mask is not None:
                if attn_mask.dtype == torch.bool:
                    zero = torch.zeros((), dtype=query.dtype, device=query.device)
                    attn_mask = torch.where(attn_mask, zero, -torch.inf)
                attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
            lse = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, attn_mask, lse, dropout_p, is_causal, scale=scale)[0]

    torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention

    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext, _device_constructors

    _device_constructors()                                # a cached set of the functions of `with torch.device`

    def constructor(function):                            # their copies to the device go past a mode
        def wrapped(data, *args, device=None, **kwargs):
            if device is None and torch._C._len_torch_function_stack():
                contexts = [m.device for m in _get_current_function_mode_stack() if isinstance(m, DeviceContext)]
                device = contexts[-1] if contexts and torch.device(contexts[-1]).type == "cuda" else None
            if isinstance(data, CudaTensor) or device is None or torch.device(device).type != "cuda":
                return function(data, *args, **kwargs) if device is None else function(data, *args, device=device, **kwargs)
            requires_grad = kwargs.pop("requires_grad", False)
            result = function(data, *args, device="cpu", **kwargs).to(CUDA)
            return result.requires_grad_() if requires_grad else result
        return wrapped

    torch.tensor, torch.as_tensor = constructor(torch.tensor), constructor(torch.as_tensor)
    CudaTensor.new_tensor = lambda self, data, dtype=None, device=None, **kwargs: torch.tensor(
        data, dtype=self.dtype if dtype is None else dtype, device=self.device if device is None else device, **kwargs)
    from torch.utils import _foreach_utils

    _foreach_utils._foreach_supported_types.append(CudaTensor)
    patch_safetensors(torch, CudaTensor)
    Mode = PretendMode()
    Mode.__enter__()
    globals()["CudaTensor"] = CudaTensor


def patch_safetensors(torch, CudaTensor):
    """Let safetensors save pretended tensors: it copies those of a card to the host itself."""
    try:
        import safetensors.torch as st
    except ImportError:
        return
    original = st._tobytes if hasattr(st, "_tobytes") else None
    if original:
        def to_bytes(tensor, name):
            if isinstance(tensor, CudaTensor):
                record("save (device to host)", tensor.elem.nbytes)
                tensor = tensor.elem
            return original(tensor, name)
        st._tobytes = to_bytes
    for name in "save_file", "save":
        function = getattr(st, name)

        def saved(tensors, *args, _function=function, **kwargs):
            plain = {}
            for key, x in tensors.items():
                if isinstance(x, CudaTensor):
                    record("save (device to host)", x.elem.nbytes)
                    x = x.elem.detach()
                plain[key] = x
            return _function(plain, *args, **kwargs)

        setattr(st, name, saved)


# ---- the report --------------------------------------------------------------------------------------------


def report():
    lines = ["", "pretended CUDA: " + " ".join(sys.argv)]
    if not LAUNCHES and not SYNCS and not ERRORS:
        return
    lines.append(f"errors of device, dtype or kernel arguments: {sum(e[0] for e in ERRORS.values())}")
    for (kind, name, place), (times, message, stack) in ERRORS.items():
        lines += [f"  {times} x {kind}: {name} at {place}: {message}", *("    | " + s for s in stack.splitlines()[-30:])]
    lines += [f"  note {times} x {text}" for text, times in NOTES.items()]
    lines.append("launches (operations that are no views), and synchronisations, by region")
    lines.append(f"  {'region':28} {'units':>6} {'launches':>9} {'per unit':>9} {'syncs':>6} {'per unit':>9}")
    syncs = Counter()
    for (_, _, region), times in SYNCS.items():
        syncs[region] += times
    for region in sorted(set(LAUNCHES) | set(syncs)):
        units = UNITS[region] or UNITS.get(region.removesuffix(", backward"), 0)
        if region == "optimiser step":
            units = LAUNCH_NAMES[region, "aten::_fused_adamw_"]
        per = [f"{n / units:9.1f}" if units else f"{'-':>9}" for n in (LAUNCHES[region], syncs[region])]
        lines.append(f"  {region:28} {units:6} {LAUNCHES[region]:9} {per[0]} {syncs[region]:6} {per[1]}")
    lines.append("synchronisations by line")
    for (kind, place, region), times in sorted(SYNCS.items(), key=lambda item: (item[0][2], -item[1])):
        size = SYNC_BYTES[kind, place, region]
        lines.append(f"  {times:7} {kind:26} {place:66} {region}" + (f"  {size / times:.3g} B each" if size else ""))
    if os.environ.get("PRETEND_LAUNCHES"):
        lines.append("launches by line")
        for (region, place), times in LAUNCH_PLACES.most_common(int(os.environ["PRETEND_LAUNCHES"])):
            lines.append(f"  {times:7} {place:66} {region}")
        lines.append("launches by operation")
        for (region, name), times in LAUNCH_NAMES.most_common(int(os.environ["PRETEND_LAUNCHES"])):
            lines.append(f"  {times:7} {name:48} {region}")
    if TRACK:
        lines.append(f"peak of pretended tensors: {Memory.peak / 1e9:.3f} GB")
    text = "\n".join(lines) + "\n"
    if not os.environ.get("PRETEND_QUIET"):
        sys.stderr.write(text)
    if path := os.environ.get("PRETEND_REPORT"):
        child = os.environ.get("PRETEND_PARENT", "") not in ("", str(os.getpid()))
        with open(f"{path}.{os.getpid()}" if child else path, "w") as file:
            file.write(text)


def install_after_import_of_torch():
    """In child processes: install as soon as torch has been imported."""
    from importlib.abc import MetaPathFinder
    from importlib.util import find_spec

    class Finder(MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name != "torch":
                return None
            sys.meta_path.remove(self)
            spec = find_spec("torch")
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                install()

            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Finder())


def prepare(root):
    global ROOT
    ROOT = os.path.abspath(root).rstrip("/") + "/"
    atexit.register(report)


def main():
    sys.modules["pretend_cuda"] = sys.modules["__main__"]
    arguments = sys.argv[1:]
    as_module = arguments[0] == "-m"
    script = arguments[1] if as_module else arguments[0]
    root = os.environ.get("PRETEND_ROOT") or (os.getcwd() if as_module else os.path.dirname(os.path.abspath(script)))
    prepare(root)
    import tempfile

    folder = tempfile.mkdtemp(prefix="pretend_cuda_")
    with open(os.path.join(folder, "sitecustomize.py"), "w") as file:
        file.write(
            "import os, sys\nsys.path.insert(0, os.path.dirname(os.environ['PRETEND_SELF']))\n"
            "import pretend_cuda\nsys.path.pop(0)\npretend_cuda.prepare(os.environ['PRETEND_ROOT'])\n"
            "pretend_cuda.install_after_import_of_torch()\n")
    os.environ.update(
        PRETEND_ROOT=root, PRETEND_SELF=SELF, PRETEND_PARENT=str(os.getpid()),
        PYTHONPATH=os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")])))
    install()
    sys.argv = [script, *arguments[2 if as_module else 1:]]
    if as_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        runpy.run_path(os.path.abspath(script), run_name="__main__")


if __name__ == "__main__":
    main()
