//! A fake CUDA driver: streams are threads with random delays, device memory is host memory.
//!
//! It rejects what the real driver rejects or what would block a progress thread: a stream whose
//! context is not current, an asynchronous copy from or to host memory that is not pinned, a call
//! that would end another thread's capture.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{JoinHandle, sleep};
use std::time::Duration;

use devcomm_rma_loopback::driver::{
    ATOMIC_REDUCTION_SUPPORTED, Address, Code, Functions, MemOp, NOT_READY, RawContext, RawEvent,
    RawStream, SUCCESS,
};

use super::memory;

const INVALID_VALUE: Code = 1;
const INVALID_CONTEXT: Code = 201;
const ILLEGAL_ADDRESS: Code = 700;
const STREAM_CAPTURE_UNSUPPORTED: Code = 900;

/// A device. Its address serves as its context.
pub struct Device {
    pub number: c_int,
    /// Longest random delay of a stream, in microseconds.
    pub delay: u64,
    /// Whether streams support atomic additions.
    pub reductions: bool,
    /// Number of copies that succeed before all later ones fail.
    pub copies_left: AtomicI64,
    /// Whether its streams are stalled.
    pub stalled: AtomicBool,
    /// Number of peer copies on its streams.
    pub peer_copies: AtomicU64,
    /// Number of calls that enqueued memory operations.
    pub batches: AtomicU64,
}

impl Device {
    /// Returns a new device, which is never freed.
    pub fn new(number: usize, delay: u64, reductions: bool) -> &'static Self {
        Box::leak(Box::new(Self {
            number: number as c_int,
            delay,
            reductions,
            copies_left: AtomicI64::new(i64::MAX),
            stalled: AtomicBool::new(false),
            peer_copies: AtomicU64::new(0),
            batches: AtomicU64::new(0),
        }))
    }

    /// Makes it this thread's current device.
    pub fn make_current(&self) {
        CURRENT.with_borrow_mut(|stack| {
            stack.clear();
            stack.push(std::ptr::from_ref(self) as usize);
        });
    }

    fn count_copy(&self) -> Code {
        let left = self.copies_left.fetch_sub(1, Ordering::Relaxed);
        if left > 0 { SUCCESS } else { ILLEGAL_ADDRESS }
    }
}

thread_local! {
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    static CAPTURE_MODE: Cell<c_int> = const { Cell::new(0) };
}

fn current() -> Option<&'static Device> {
    let top = CURRENT.with_borrow(|stack| stack.last().copied())?;
    // SAFETY: only null or addresses of devices, which are never freed, are pushed.
    unsafe { (top as *const Device).as_ref() }
}

/// Returns this thread's capture mode: 0 is global, 2 is relaxed.
pub fn capture_mode_of_this_thread() -> c_int {
    CAPTURE_MODE.get()
}

/// Returns whether some calls of this thread would end a capture of another thread that is in the
/// global mode. The real driver (13.0) refuses them: allocations and releases of pinned memory, and
/// queries of streams, but not mappings of memory.
fn ends_captures() -> bool {
    CAPTURE_MODE.get() != 2
}

/// Returns the depth of this thread's stack of contexts.
pub fn contexts_on_stack() -> usize {
    CURRENT.with_borrow(Vec::len)
}

static PINNED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

fn is_pinned(address: *const c_void, bytes: usize) -> bool {
    let pinned = PINNED.lock().unwrap();
    let before = pinned.range(..=address as usize).next_back();
    before.is_some_and(|(base, size)| address as usize + bytes <= base + size)
}

#[derive(Default)]
struct Event {
    recorded: AtomicU64,
    completed: Mutex<u64>,
    changed: Condvar,
}

enum Task {
    Copy { to: usize, from: usize, bytes: usize },
    Operation(MemOp),
    RecordEvent(Arc<Event>, u64),
    WaitEvent(Arc<Event>, u64),
}

struct Stream {
    device: &'static Device,
    tasks: Option<Sender<Task>>,
    pending: Arc<AtomicU64>,
    worker: Option<JoinHandle<()>>,
}

/// Pseudo-random numbers from a seed.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end.max(1)
    }
}

fn execute(tasks: &Receiver<Task>, pending: &AtomicU64, device: &Device, seed: u64) {
    let delay = device.delay;
    let mut random = Random(seed);
    let mut pause = |one_in| {
        if delay > 0 && random.below(one_in) == 0 {
            sleep(Duration::from_micros(random.below(delay + 1)));
        }
    };
    while let Ok(task) = tasks.recv() {
        pause(4);
        while device.stalled.load(Ordering::Acquire) {
            sleep(Duration::from_millis(1));
        }
        match task {
            Task::Copy { to, from, bytes } => {
                // In two halves, with a pause: a read that is too early sees only one.
                let half = bytes / 2;
                // SAFETY: the test registered the ranges; tests detect races with a copy.
                unsafe { std::ptr::copy(from as *const u8, to as *mut u8, half) };
                pause(8);
                // SAFETY: the test registered the ranges; tests detect races with a copy.
                unsafe {
                    std::ptr::copy(
                        (from + half) as *const u8,
                        (to + half) as *mut u8,
                        bytes - half,
                    );
                }
            }
            Task::Operation(MemOp([operation, address, third, fourth, ..])) => {
                let word = |address| {
                    // SAFETY: the word is aligned; the test registered or the plugin pinned it.
                    unsafe { AtomicU64::from_ptr(address as *mut u64) }
                };
                match operation & 0xffff_ffff {
                    MemOp::WRITE_32 => {
                        // SAFETY: the 4 bytes are aligned; the test registered them.
                        let target = unsafe { AtomicU32::from_ptr(address as *mut u32) };
                        target.store(third as u32, Ordering::SeqCst);
                    }
                    MemOp::WRITE_64 => word(address).store(third, Ordering::SeqCst),
                    // Its address is the third word, since the second is the operation.
                    MemOp::REDUCTION => {
                        word(third).fetch_add(fourth, Ordering::SeqCst);
                    }
                    _ => {}
                }
            }
            Task::RecordEvent(event, number) => {
                let mut completed = event.completed.lock().unwrap();
                *completed = (*completed).max(number);
                event.changed.notify_all();
            }
            Task::WaitEvent(event, number) => {
                let mut completed = event.completed.lock().unwrap();
                while *completed < number {
                    completed = event.changed.wait(completed).unwrap();
                }
            }
        }
        pending.fetch_sub(1, Ordering::SeqCst);
    }
}

fn push(stream: RawStream, task: Task) -> Code {
    // SAFETY: the plugin passes a stream that `create` made.
    let stream = unsafe { &*stream.cast::<Stream>() };
    if !current().is_some_and(|device| std::ptr::eq(device, stream.device)) {
        return INVALID_CONTEXT;
    }
    stream.pending.fetch_add(1, Ordering::SeqCst);
    stream.tasks.as_ref().unwrap().send(task).unwrap();
    SUCCESS
}

fn device_of(stream: RawStream) -> &'static Device {
    // SAFETY: the plugin passes a stream that `create` made.
    unsafe { &*stream.cast::<Stream>() }.device
}

fn copy(stream: RawStream, to: usize, from: usize, bytes: usize) -> Code {
    match device_of(stream).count_copy() {
        SUCCESS => push(stream, Task::Copy { to, from, bytes }),
        code => code,
    }
}

/// Writes an out parameter.
///
/// # Safety
///
/// `to` is valid for a write.
unsafe fn set_out<T>(to: *mut T, value: T) -> Code {
    // SAFETY: the plugin passes a valid out pointer.
    unsafe { to.write(value) };
    SUCCESS
}

unsafe extern "C" fn init(_: c_uint) -> Code {
    SUCCESS
}
unsafe extern "C" fn error_name(code: Code, name: *mut *const c_char) -> Code {
    let text = match code {
        INVALID_CONTEXT => c"CUDA_ERROR_INVALID_CONTEXT",
        STREAM_CAPTURE_UNSUPPORTED => c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        ILLEGAL_ADDRESS => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        _ => c"CUDA_ERROR_INVALID_VALUE",
    };
    // SAFETY: the plugin passes a valid out pointer.
    unsafe { set_out(name, text.as_ptr()) }
}
unsafe extern "C" fn version(version: *mut c_int) -> Code {
    // SAFETY: the plugin passes a valid out pointer.
    unsafe { set_out(version, 13_010) }
}
unsafe extern "C" fn attribute(value: *mut c_int, attribute: c_int, _: c_int) -> Code {
    let Some(device) = current() else { return INVALID_CONTEXT };
    let has = attribute != ATOMIC_REDUCTION_SUPPORTED || device.reductions;
    // SAFETY: the plugin passes a valid out pointer.
    unsafe { set_out(value, c_int::from(has)) }
}
unsafe extern "C" fn get_current(context: *mut RawContext) -> Code {
    let top = current().map_or(null_mut(), |device| std::ptr::from_ref(device).cast_mut().cast());
    // SAFETY: the plugin passes a valid out pointer.
    unsafe { set_out(context, top) }
}
unsafe extern "C" fn push_current(context: RawContext) -> Code {
    CURRENT.with_borrow_mut(|stack| stack.push(context as usize));
    SUCCESS
}
unsafe extern "C" fn pop_current(context: *mut RawContext) -> Code {
    let Some(top) = CURRENT.with_borrow_mut(Vec::pop) else { return INVALID_CONTEXT };
    // SAFETY: the plugin passes a valid out pointer.
    unsafe { set_out(context, top as RawContext) }
}
unsafe extern "C" fn get_device(number: *mut c_int) -> Code {
    let Some(device) = current() else { return INVALID_CONTEXT };
    // SAFETY: the plugin passes a valid out pointer.
    unsafe { set_out(number, device.number) }
}
unsafe extern "C" fn priorities(least: *mut c_int, greatest: *mut c_int) -> Code {
    // SAFETY: the plugin passes a valid out pointer.
    unsafe { (*least, *greatest) = (0, -5) };
    SUCCESS
}
unsafe extern "C" fn create(stream: *mut RawStream, _: c_uint, _: c_int) -> Code {
    static SEED: AtomicU64 = AtomicU64::new(1);
    let Some(device) = current() else { return INVALID_CONTEXT };
    let (tasks, received) = channel();
    let pending = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&pending);
    let seed = SEED.fetch_add(7919, Ordering::Relaxed);
    let worker = std::thread::spawn(move || execute(&received, &counted, device, seed));
    let new = Stream { device, tasks: Some(tasks), pending, worker: Some(worker) };
    // SAFETY: the plugin passes a valid out pointer.
    unsafe { set_out(stream, Box::into_raw(Box::new(new)).cast()) }
}
unsafe extern "C" fn destroy(stream: RawStream) -> Code {
    // SAFETY: the plugin passes a stream that `create` made, and does not use it again.
    let mut stream = unsafe { Box::from_raw(stream.cast::<Stream>()) };
    drop(stream.tasks.take());
    let _ = stream.worker.take().map(JoinHandle::join);
    SUCCESS
}
unsafe extern "C" fn query(stream: RawStream) -> Code {
    // SAFETY: the plugin passes a stream that `create` made.
    let stream = unsafe { &*stream.cast::<Stream>() };
    if ends_captures() {
        return STREAM_CAPTURE_UNSUPPORTED;
    }
    if stream.pending.load(Ordering::SeqCst) > 0 { NOT_READY } else { SUCCESS }
}
unsafe extern "C" fn batch(
    stream: RawStream,
    count: c_uint,
    operations: *mut MemOp,
    flags: c_uint,
) -> Code {
    // SAFETY: the plugin passes an array of `count` operations.
    let operations = unsafe { std::slice::from_raw_parts(operations, count as usize) };
    if flags != 0 || count >= 256 {
        return INVALID_VALUE;
    }
    device_of(stream).batches.fetch_add(1, Ordering::Relaxed);
    for operation in operations {
        let MemOp([kind, second, ..]) = *operation;
        let known = match kind {
            MemOp::WRITE_32 | MemOp::WRITE_64 | MemOp::BARRIER => true,
            MemOp::REDUCTION => second == MemOp::REDUCTION_U64 << 32,
            _ => false,
        };
        if !known {
            return INVALID_VALUE;
        }
        match push(stream, Task::Operation(*operation)) {
            SUCCESS => {}
            code => return code,
        }
    }
    SUCCESS
}
unsafe extern "C" fn event_create(event: *mut RawEvent, _: c_uint) -> Code {
    // SAFETY: the plugin passes a valid out pointer.
    unsafe { set_out(event, Arc::into_raw(Arc::<Event>::default()).cast_mut().cast()) }
}
unsafe extern "C" fn event_destroy(event: RawEvent) -> Code {
    // SAFETY: the plugin passes an event that `event_create` made, and does not use it again.
    drop(unsafe { Arc::from_raw(event.cast::<Event>()) });
    SUCCESS
}
fn event_of(event: RawEvent) -> Arc<Event> {
    // SAFETY: the plugin passes an event that `event_create` made.
    unsafe { Arc::increment_strong_count(event.cast::<Event>()) };
    // SAFETY: the event is live; the line above added the reference that is returned.
    unsafe { Arc::from_raw(event.cast::<Event>()) }
}
unsafe extern "C" fn record(event: RawEvent, stream: RawStream) -> Code {
    let event = event_of(event);
    let number = event.recorded.fetch_add(1, Ordering::SeqCst) + 1;
    push(stream, Task::RecordEvent(event, number))
}
unsafe extern "C" fn wait(stream: RawStream, event: RawEvent, _: c_uint) -> Code {
    let event = event_of(event);
    let number = event.recorded.load(Ordering::SeqCst);
    push(stream, Task::WaitEvent(event, number))
}
unsafe extern "C" fn host_alloc(host: *mut *mut c_void, bytes: usize, _: c_uint) -> Code {
    if ends_captures() {
        return STREAM_CAPTURE_UNSUPPORTED;
    }
    let memory = vec![0xaa_u128; bytes.div_ceil(16)].leak().as_mut_ptr();
    PINNED.lock().unwrap().insert(memory as usize, bytes);
    // SAFETY: the plugin passes a valid out pointer.
    unsafe { set_out(host, memory.cast()) }
}
unsafe extern "C" fn host_free(host: *mut c_void) -> Code {
    if ends_captures() {
        return STREAM_CAPTURE_UNSUPPORTED;
    }
    // The memory is leaked, so that an access after the free does not crash the test.
    if PINNED.lock().unwrap().remove(&(host as usize)).is_some() { SUCCESS } else { INVALID_VALUE }
}
unsafe extern "C" fn host_register(host: *mut c_void, bytes: usize, _: c_uint) -> Code {
    if ends_captures() {
        return STREAM_CAPTURE_UNSUPPORTED;
    }
    PINNED.lock().unwrap().insert(host as usize, bytes);
    SUCCESS
}
unsafe extern "C" fn device_pointer(address: *mut Address, host: *mut c_void, _: c_uint) -> Code {
    // SAFETY: the plugin passes a valid out pointer.
    unsafe { set_out(address, host as Address) }
}
unsafe extern "C" fn to_device(
    to: Address,
    from: *const c_void,
    bytes: usize,
    stream: RawStream,
) -> Code {
    if !is_pinned(from, bytes) {
        return INVALID_VALUE;
    }
    copy(stream, to as usize, from as usize, bytes)
}
unsafe extern "C" fn to_host(
    to: *mut c_void,
    from: Address,
    bytes: usize,
    stream: RawStream,
) -> Code {
    if !is_pinned(to, bytes) {
        return INVALID_VALUE;
    }
    copy(stream, to as usize, from as usize, bytes)
}
unsafe extern "C" fn device_to_device(
    to: Address,
    from: Address,
    bytes: usize,
    stream: RawStream,
) -> Code {
    let number = device_of(stream).number;
    match (memory::translate(to, number), memory::translate(from, number)) {
        (Some(to), Some(from)) => copy(stream, to, from, bytes),
        _ => ILLEGAL_ADDRESS,
    }
}
unsafe extern "C" fn can_access_peer(can: *mut c_int, _: c_int, _: c_int) -> Code {
    // SAFETY: the plugin passes a valid out pointer.
    unsafe { set_out(can, 1) }
}
unsafe extern "C" fn peer(
    to: Address,
    _: RawContext,
    from: Address,
    _: RawContext,
    bytes: usize,
    stream: RawStream,
) -> Code {
    device_of(stream).peer_copies.fetch_add(1, Ordering::Relaxed);
    copy(stream, to as usize, from as usize, bytes)
}
unsafe extern "C" fn capture_mode(mode: *mut c_int) -> Code {
    // SAFETY: the plugin passes a valid out pointer.
    unsafe { set_out(mode, CAPTURE_MODE.replace(*mode)) }
}

/// Returns the fake driver's function table.
pub fn functions() -> Functions {
    Functions {
        cuInit: init,
        cuGetErrorName: error_name,
        cuDriverGetVersion: version,
        cuDeviceGetAttribute: attribute,
        cuDeviceCanAccessPeer: can_access_peer,
        cuMemGetAccess: memory::access,
        cuMemGetAddressRange_v2: memory::range,
        cuMemRetainAllocationHandle: memory::retain,
        cuMemAddressReserve: memory::reserve,
        cuMemAddressFree: memory::free_address,
        cuMemMap: memory::map,
        cuMemSetAccess: memory::set_access,
        cuMemUnmap: memory::unmap,
        cuMemRelease: memory::release,
        cuCtxGetCurrent: get_current,
        cuCtxPushCurrent_v2: push_current,
        cuCtxPopCurrent_v2: pop_current,
        cuCtxGetDevice: get_device,
        cuCtxGetStreamPriorityRange: priorities,
        cuStreamCreateWithPriority: create,
        cuStreamDestroy_v2: destroy,
        cuStreamQuery: query,
        cuStreamWaitEvent: wait,
        cuStreamBatchMemOp_v2: batch,
        cuEventCreate: event_create,
        cuEventDestroy_v2: event_destroy,
        cuEventRecord: record,
        cuMemHostAlloc: host_alloc,
        cuMemHostRegister_v2: host_register,
        cuMemHostUnregister: host_free,
        cuMemHostGetDevicePointer_v2: device_pointer,
        cuMemFreeHost: host_free,
        cuMemcpyHtoDAsync_v2: to_device,
        cuMemcpyDtoHAsync_v2: to_host,
        cuMemcpyDtoDAsync_v2: device_to_device,
        cuMemcpyPeerAsync: peer,
        cuThreadExchangeStreamCaptureMode: capture_mode,
    }
}
