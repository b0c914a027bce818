//! A fake of NCCL, with which the plugin's tests run without NCCL and without a GPU: it calls the
//! functions in the plugin's exported tables as NCCL's proxy thread does, in the same order and
//! from the same kinds of threads. A fake driver ([`driver`]) has the devices.
#![allow(dead_code, reason = "each test program uses some of it")]

pub mod bootstrap;
pub mod buffer;
pub mod driver;
mod listening;
pub mod memory;
pub mod work;

use std::cell::{Cell, RefCell};
use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use devcomm_rma_loopback::abi::{
    HANDLE_BYTES, MAX_REQUESTS, MR_SIGNAL_NEVER_RESET, NET_DEVICE_GIN_PROXY, NetProperties, Opaque,
    PTR_CUDA, PTR_HOST, RmaConfig, RmaProperties, SIGNAL_ADD, SUCCESS, Status,
};
use devcomm_rma_loopback::config::Config;
use devcomm_rma_loopback::driver::Driver;
use devcomm_rma_loopback::setup::Setup;
use devcomm_rma_loopback::{ncclRmaPlugin_v14, ncclRmaPlugin_v15, ncclRmaPlugin_v16};

pub use buffer::Memory;
use driver::Device;
pub use listening::{Listening, listen};
use memory::Kind;

/// Options of [`run_ranks`], and of the ranks in it.
#[derive(Clone)]
pub struct Options {
    pub ranks: usize,
    /// GIN contexts of each rank.
    pub contexts: usize,
    /// Version of NCCL's RMA plugin interface: 14, 15 or 16.
    pub version: u32,
    /// Longest random delay of a stream, in microseconds.
    pub delay: u64,
    /// Whether streams can add to a word in memory (the driver's atomic reductions).
    pub reductions: bool,
    /// How the ranks' device memory is allocated.
    pub memory: Kind,
    pub config: Config,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            ranks: 2,
            contexts: 1,
            version: 16,
            delay: 50,
            reductions: false,
            memory: Kind::AllDevices,
            config: Config { timeout: Duration::from_secs(10), ..Config::default() },
        }
    }
}

/// NCCL's bootstrap within a process: how ranks exchange handles.
pub struct Bootstrap {
    pub barrier: Barrier,
    handles: Mutex<Vec<[u8; HANDLE_BYTES]>>,
}

impl Bootstrap {
    pub fn new(ranks: usize) -> Self {
        Self { barrier: Barrier::new(ranks), handles: Mutex::new(vec![[0; HANDLE_BYTES]; ranks]) }
    }
}

/// More calls of `rmaProgress` than `inbound::PATIENCE`: after them a put is enqueued, even if its
/// target makes no progress.
pub const IMPATIENCE: usize = 1100;

/// A location in a region: the region's handle, and an offset in bytes.
pub type RegionOffset = (Opaque, usize);
/// No region: for a signal without data.
pub const NO_DATA: RegionOffset = (null_mut(), 0);

/// A rank, with what NCCL's proxy thread keeps for it. `Opaque` values are the plugin's handles.
pub struct Rank {
    pub rank: usize,
    pub ranks: usize,
    pub device: &'static Device,
    version: u32,
    memory: Kind,
    /// The plugin's state of this rank, from `init` to `finalize`.
    ctx: Opaque,
    /// The connection with all ranks.
    pub comm: Opaque,
    /// The GIN contexts on this connection, as one handle.
    pub context: Cell<Opaque>,
    closed: Cell<bool>,
    /// Operations that are not yet complete.
    requests: RefCell<Vec<Opaque>>,
    /// The maximum number of requests that NCCL has outstanding with a peer.
    pub depth: usize,
}

// SAFETY: one thread at a time acts as the proxy.
unsafe impl Send for Rank {}

/// Panics unless the call succeeded.
#[track_caller]
pub fn ok(status: Status) {
    assert_eq!(status, SUCCESS);
}

/// Calls an operation of the interface in the given version, with `opt_flags` from 15 on, which
/// the plugin ignores; returns its status and request.
macro_rules! call_version {
    ($version:expr, $name:ident($($argument:expr),*)) => {{
        let mut request = null_mut();
        let out = &raw mut request;
        // SAFETY: the arguments follow the interface.
        let status = unsafe {
            match $version {
                14 => (ncclRmaPlugin_v14.$name)($($argument,)* out),
                15 => (ncclRmaPlugin_v15.$name)($($argument,)* 1, out),
                _ => (ncclRmaPlugin_v16.$name)($($argument,)* 0, out),
            }
        };
        (status, request)
    }};
}

impl Rank {
    /// Starts a rank as NCCL does, together with the other ranks of `bootstrap`.
    pub fn start(
        options: &Options,
        rank: usize,
        device: &'static Device,
        bootstrap: &Bootstrap,
    ) -> Self {
        let listening = listen();
        bootstrap.handles.lock().unwrap()[rank] = listening.handle;
        bootstrap.barrier.wait();
        let mut handles = bootstrap.handles.lock().unwrap().clone();
        Self::connect(options, rank, device, &listening, &mut handles)
    }

    pub fn connect(
        options: &Options,
        rank: usize,
        device: &'static Device,
        listening: &Listening,
        handles: &mut [[u8; HANDLE_BYTES]],
    ) -> Self {
        let (status, comm) = listening.connect(handles, rank);
        ok(status);
        listening.close();
        let mut guarantees = RmaProperties { flushes_all_puts_on_any_signal: true };
        // SAFETY: zero is a valid value of every field.
        let mut properties = unsafe { std::mem::zeroed::<NetProperties>() };
        // SAFETY: the arguments follow the interface.
        unsafe {
            let plugin = &ncclRmaPlugin_v16;
            ok((plugin.get_rma_properties)(comm, &raw mut guarantees));
            ok((plugin.get_properties)(0, &raw mut properties));
        }
        assert!(!guarantees.flushes_all_puts_on_any_signal);
        assert_eq!(properties.net_device_type, NET_DEVICE_GIN_PROXY);
        assert!(properties.max_recvs.count_ones() == 1 && !properties.name.is_null());
        let new = Self {
            rank,
            ranks: handles.len(),
            device,
            version: options.version,
            memory: options.memory,
            ctx: listening.ctx,
            comm,
            context: Cell::new(null_mut()),
            closed: Cell::new(false),
            requests: RefCell::default(),
            depth: MAX_REQUESTS * properties.max_recvs as usize,
        };
        new.create_context(options.contexts);
        new
    }

    /// Creates the rank's contexts. It must have none.
    pub fn create_context(&self, contexts: usize) {
        let n_contexts = contexts as c_int;
        let mut config = RmaConfig { n_contexts, traffic_class: -1, rank_stride: 1 };
        let mut context = null_mut();
        // SAFETY: the arguments follow the interface.
        unsafe {
            let create = ncclRmaPlugin_v16.create_context;
            ok(create(self.comm, &raw mut config, &raw mut context));
        }
        self.context.set(context);
    }

    pub fn register(&self, memory: &Memory, kind: c_int, flags: u64) -> Opaque {
        if kind == PTR_CUDA {
            let base = memory.base() as usize;
            memory::allocate(base, memory.bytes(), self.device.number, self.memory);
        }
        self.register_raw(memory.base().cast(), memory.bytes(), kind, flags)
    }

    pub fn register_raw(&self, base: Opaque, bytes: usize, kind: c_int, flags: u64) -> Opaque {
        let mut handle = null_mut();
        // SAFETY: the arguments follow the interface.
        unsafe {
            let register = ncclRmaPlugin_v16.reg_mr_sym;
            ok(register(self.comm, base, bytes, kind, flags, &raw mut handle));
        }
        assert!(!handle.is_null() && (handle as u64) >> 63 == 0, "a handle has 63 bits");
        handle
    }

    /// Registers device memory.
    pub fn window(&self, memory: &Memory) -> Opaque {
        self.register(memory, PTR_CUDA, 0)
    }

    /// Registers the signals of a device communicator.
    pub fn signals(&self, memory: &Memory) -> Opaque {
        const FORCE_SO: u64 = 1; // NCCL_NET_MR_FLAG_FORCE_SO, which the plugin ignores
        self.register(memory, PTR_CUDA, FORCE_SO | MR_SIGNAL_NEVER_RESET)
    }

    /// Registers host memory, pinned or not.
    pub fn host(&self, memory: &Memory) -> Opaque {
        self.register(memory, PTR_HOST, 0)
    }

    pub fn deregister(&self, handle: Opaque) -> Status {
        // SAFETY: the arguments follow the interface.
        unsafe { (ncclRmaPlugin_v16.dereg_mr_sym)(self.comm, handle) }
    }

    pub fn try_put(
        &self,
        context: usize,
        from: RegionOffset,
        bytes: usize,
        to: RegionOffset,
        rank: usize,
    ) -> (Status, Opaque) {
        let (at, c, rank) = (self.context.get(), context as c_int, rank as u32);
        let (s, d) = (from.1 as u64, to.1 as u64);
        call_version!(self.version, iput(at, c, s, from.0, bytes, d, to.0, rank))
    }

    /// Does the same as [`Rank::try_put`], and then makes progress until the put is enqueued, by
    /// [`IMPATIENCE`] calls. Returns the first error.
    pub fn try_put_now(
        &self,
        from: RegionOffset,
        bytes: usize,
        to: RegionOffset,
        rank: usize,
    ) -> Status {
        let put = self.try_put(0, from, bytes, to, rank).0;
        let progress = (0..IMPATIENCE).map(|_| self.try_progress());
        [put].into_iter().chain(progress).find(|status| *status != SUCCESS).unwrap_or(SUCCESS)
    }

    pub fn put(
        &self,
        context: usize,
        from: RegionOffset,
        bytes: usize,
        to: RegionOffset,
        rank: usize,
    ) {
        let (status, request) = self.try_put(context, from, bytes, to, rank);
        ok(status);
        self.track(request);
    }

    #[allow(clippy::too_many_arguments, reason = "NCCL's")]
    pub fn try_put_signal(
        &self,
        context: usize,
        from: RegionOffset,
        bytes: usize,
        to: RegionOffset,
        rank: usize,
        signal: RegionOffset,
        add: u64,
        op: u32,
    ) -> (Status, Opaque) {
        let (at, c, rank) = (self.context.get(), context as c_int, rank as u32);
        let (s, d, g) = (from.1 as u64, to.1 as u64, signal.1 as u64);
        call_version!(
            self.version,
            iput_signal(at, c, s, from.0, bytes, d, to.0, rank, g, signal.0, add, op, true)
        )
    }

    #[allow(clippy::too_many_arguments, reason = "NCCL's")]
    pub fn put_signal(
        &self,
        context: usize,
        from: RegionOffset,
        bytes: usize,
        to: RegionOffset,
        rank: usize,
        signal: RegionOffset,
        add: u64,
        op: u32,
    ) {
        let (status, request) =
            self.try_put_signal(context, from, bytes, to, rank, signal, add, op);
        ok(status);
        self.track(request);
    }

    /// Sends a signal without data, as NCCL's proxy sends a VA signal (one in a word of a window).
    pub fn signal(&self, context: usize, rank: usize, signal: RegionOffset, add: u64) {
        self.put_signal(context, NO_DATA, 0, NO_DATA, rank, signal, add, SIGNAL_ADD);
    }

    pub fn get(
        &self,
        context: usize,
        from: RegionOffset,
        bytes: usize,
        to: RegionOffset,
        rank: usize,
    ) {
        let (at, c, rank) = (self.context.get(), context as c_int, rank as u32);
        let (r, l) = (from.1 as u64, to.1 as u64);
        let (status, request) =
            call_version!(self.version, iget(at, c, r, from.0, bytes, l, to.0, rank));
        ok(status);
        self.track(request);
    }

    pub fn flush(&self, context: usize, region: Opaque) {
        let mut request = 8 as Opaque; // not null, so that the assertion sees what is written
        // SAFETY: the arguments follow the interface.
        unsafe {
            let flush = ncclRmaPlugin_v16.iflush;
            let rank = self.rank as u32;
            ok(flush(self.context.get(), context as c_int, region, rank, &raw mut request));
        }
        assert!(request.is_null(), "a flush has nothing to do");
    }

    #[track_caller]
    fn track(&self, request: Opaque) {
        assert!(!request.is_null(), "NCCL tests every put and get");
        self.requests.borrow_mut().push(request);
        // NCCL's limit per peer, here applied to all peers together.
        self.poll_until(self.depth);
    }

    pub fn try_test(&self, request: Opaque) -> (Status, bool) {
        let mut done = 0;
        // SAFETY: the arguments follow the interface.
        let status = unsafe { (ncclRmaPlugin_v16.test)(self.comm, request, &raw mut done) };
        (status, done != 0)
    }

    pub fn try_progress(&self) -> Status {
        // SAFETY: the arguments follow the interface.
        unsafe { (ncclRmaPlugin_v16.rma_progress)(self.context.get()) }
    }

    /// Polls as NCCL's progress thread does, until at most `left` requests are outstanding.
    pub fn poll_until(&self, left: usize) {
        let give_up = Instant::now() + Duration::from_secs(15);
        while self.requests.borrow().len() > left {
            self.requests.borrow_mut().retain(|request| {
                let (status, done) = self.try_test(*request);
                ok(status);
                !done
            });
            ok(self.try_progress());
            assert!(Instant::now() < give_up, "a request never completes");
            std::thread::yield_now();
        }
    }

    /// Polls until all requests are complete.
    pub fn drain(&self) {
        self.poll_until(0);
    }

    /// Makes progress until `until` holds: ranks of other processes need this rank's progress.
    pub fn serve(&self, until: impl Fn() -> bool) {
        let give_up = Instant::now() + Duration::from_secs(15);
        while !until() {
            ok(self.try_progress());
            assert!(Instant::now() < give_up, "the awaited condition never holds");
            std::thread::yield_now();
        }
    }

    pub fn has_error(&self) -> bool {
        let mut has_error = false;
        // SAFETY: the arguments follow the interface.
        unsafe {
            let query = ncclRmaPlugin_v16.query_last_error;
            ok(query(self.context.get(), &raw mut has_error));
        }
        has_error
    }

    pub fn destroy_context(&self) {
        // SAFETY: the context is not used again.
        unsafe { ok((ncclRmaPlugin_v16.destroy_context)(self.context.replace(null_mut()))) };
    }

    /// Closes as NCCL does.
    pub fn close(&self) {
        if self.closed.replace(true) {
            return;
        }
        if !self.context.get().is_null() {
            self.destroy_context();
        }
        // SAFETY: the connection is not used again.
        unsafe {
            ok((ncclRmaPlugin_v16.close_coll)(self.comm));
            ok((ncclRmaPlugin_v16.finalize)(self.ctx));
        }
    }
}

/// Returns the plugin's setup with the fake driver and these settings.
pub fn setup(config: Config) -> Setup {
    Setup { driver: Arc::new(Driver::new(driver::functions()).unwrap()), config }
}

/// Returns a new device, current on this thread. Ranks that start on this thread use the options'
/// settings.
pub fn device(number: usize, options: &Options) -> &'static Device {
    let device = Device::new(number, options.delay, options.reductions);
    device.make_current();
    setup(options.config).use_on_this_thread();
    device
}

/// Runs `body` on every rank, each on a thread of this process with its own device.
pub fn run_ranks(options: &Options, body: impl Fn(&Rank, &Bootstrap) + Sync) {
    let bootstrap = Bootstrap::new(options.ranks);
    let (bootstrap, body) = (&bootstrap, &body);
    std::thread::scope(|scope| {
        for rank in 0..options.ranks {
            scope.spawn(move || {
                let rank = Rank::start(options, rank, device(rank, options), bootstrap);
                assert_eq!(driver::contexts_on_stack(), 1, "the same context is current");
                // NCCL's progress threads have no context.
                on_another_thread(&rank, |rank| {
                    body(rank, bootstrap);
                    assert_eq!(driver::contexts_on_stack(), 0, "no context is left behind");
                });
                bootstrap.barrier.wait();
                rank.close();
            });
        }
    });
}

/// Runs `body` on another thread, and waits for it.
pub fn on_another_thread(rank: &Rank, body: impl FnOnce(&Rank) + Send) {
    struct SendRef<'a>(&'a Rank);
    // SAFETY: the calling thread does not use the rank while the other thread runs.
    unsafe impl Send for SendRef<'_> {}
    let sent = SendRef(rank);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let received = sent;
            body(received.0);
        });
    });
}
