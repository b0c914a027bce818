//! Checks and posts GIN operations: put, put of a value, get and signal.

use std::ffi::c_void;
use std::rc::Rc;

use cuda_std::arch::Order;
use devcomm_types::WaitKind;
use devcomm_types::nccl::{CoopAny, Gin, GinDescriptorSmem, Team};

use super::network::{Add, Operation, Poster, Transfer};
use super::{Call, SignalOp};
use crate::base::mutation::Change;
use crate::base::owner::Owner;
use crate::gpu::nccl::view;
use crate::gpu::ranks;
use crate::gpu::thread::{Grid, Thread, Wait};
use crate::gpu::waits::{self, Until};
use crate::race::Releases;

/// The signal of an operation, as specified by a function's parameters.
#[derive(Clone, Copy)]
enum Signal {
    None,
    Indexed { id: u32, strong: bool, op: i32, arg: u64 },
    Va { window: *mut c_void, offset: usize, strong: bool, op: i32, arg: u64 },
}

/// `cuda::thread_scope_system`.
const SYSTEM: i32 = 0;

impl Call<'_> {
    /// Returns the call of an operation whose kernel says at which scope it has released its writes
    /// (`givenRelease`), and at which one they are to be released (`requiredRelease`). Unless the
    /// kernel has done it at the system's scope, NCCL releases them. PROXY does so at that scope in
    /// any case, but GDAKI and GPI only if it is required.
    fn release(self, given: i32, required: i32) -> Self {
        let releases = if required == SYSTEM { Releases::ToSystem } else { Releases::ToGpu };
        self.releasing(if given == SYSTEM { Releases::Nothing } else { releases })
    }

    /// Returns the call of an operation, before which NCCL releases the thread's writes.
    pub(super) fn releasing(self, releases: Releases) -> Self {
        let order = match releases {
            Releases::Nothing => Order::Relaxed,
            Releases::ToGpu | Releases::ToSystem => Order::Release,
        };
        let changed = self.gpus.change_at(self.at).map_or(order, |change| change.order(order));
        match (changed, releases) {
            (Order::Release, Releases::Nothing) => Self { releases: Releases::ToSystem, ..self },
            (Order::Release, _) => Self { releases, ..self },
            _ => Self { releases: Releases::Nothing, ..self },
        }
    }

    /// Returns the signal of a function with the parameter `is_signal` (NCCL's older functions).
    fn legacy(&self, is_signal: bool, id: u32, op: i32, arg: u64) -> Signal {
        let strong = self.gin.strong;
        if is_signal { Signal::Indexed { id, strong, op, arg } } else { Signal::None }
    }

    /// Returns the signal of a function with the parameter `signal_type` (`_v3`).
    fn signal_of_type(
        &self,
        signal_type: i32,
        window: *mut c_void,
        offset: usize,
        id: u32,
        strong: bool,
        (op, arg): (i32, u64),
    ) -> Signal {
        match signal_type {
            0 => Signal::None,
            1 => Signal::Va { window, offset, strong, op, arg },
            2 => Signal::Indexed { id, strong, op, arg },
            other => {
                self.misuse(format!("{other} is not a signal type: use 0, 1 (VA) or 2 (indexed)"))
            }
        }
    }

    /// Returns the address of byte `offset` of world rank `rank`'s part; checks that `bytes` bytes
    /// follow.
    ///
    /// # Safety
    ///
    /// `window` is NULL or a window.
    unsafe fn address(
        &self,
        what: &str,
        window: *mut c_void,
        offset: usize,
        bytes: usize,
        rank: u32,
    ) -> *mut u8 {
        // SAFETY: the kernel passes a window that the host registered.
        let view = unsafe { view(window) };
        view.world_address(offset, bytes, rank as usize).unwrap_or_else(|| {
            let len = view.lens[rank as usize];
            let owner = Owner::Window { id: view.id, rank: rank as usize };
            let window = Thread::current().arguments().name(owner, 0);
            self.misuse(format!(
                "{what} {bytes} bytes at byte {offset} of {window}, which has {len}"
            ))
        })
    }

    /// Returns the addition that a signal makes on world rank `peer`; checks and records its
    /// operation.
    ///
    /// # Safety
    ///
    /// A window in `signal` is NULL or a window.
    unsafe fn add(&self, signal: Signal, peer: u32) -> Option<Add> {
        let target = &self.gin.per_rank[peer as usize];
        let (op, arg) = match signal {
            Signal::None => return None,
            Signal::Indexed { op, arg, .. } | Signal::Va { op, arg, .. } => (op, arg),
        };
        let (op, value) = match op {
            0 => (SignalOp::Inc, 1),
            1 => (SignalOp::Add, arg),
            other => self
                .misuse(format!("{other} is not a signal operation: use 0 (increment) or 1 (add)")),
        };
        let (word, previous, strong, which) = match signal {
            Signal::None => return None,
            Signal::Indexed { id, strong, .. } => {
                let id = match self.gpus.change_at(self.at) {
                    Some(Change::Signal(by)) => id.wrapping_add_signed(by),
                    _ => id,
                };
                let index = self.signal(id);
                let previous = target.ops[index].replace(Some(op));
                (target.signals[index].as_ptr(), previous, strong, format!("signal {id}"))
            }
            Signal::Va { window, offset, strong, .. } => {
                // SAFETY: the kernel passes a window that the host registered.
                let (word, key) = unsafe { self.va_word(window, offset, peer) };
                let previous = target.va_ops.borrow_mut().insert(key, op);
                (word, previous, strong, format!("the signal at byte {offset} of a window"))
            }
        };
        if previous.is_some_and(|previous| previous != op) {
            let peer = ranks::name(&self.gin.gpus, peer);
            self.misuse(format!(
                "{which} of {peer} is both incremented and added to without a reset: some back \
                ends count these separately"
            ));
        }
        let in_window = matches!(signal, Signal::Va { .. });
        Some(Add { word, value, strong, in_window })
    }

    /// Returns the 64-bit word of a signal in a window, checked, and its key in
    /// [`GinRank`](super::GinRank)'s map.
    ///
    /// # Safety
    ///
    /// `window` is NULL or a window.
    pub(super) unsafe fn va_word(
        &self,
        window: *mut c_void,
        offset: usize,
        rank: u32,
    ) -> (*mut u64, (u32, usize)) {
        // SAFETY: the kernel passes a window that the host registered.
        let word = unsafe { self.address("a signal of", window, offset, size_of::<u64>(), rank) };
        if !offset.is_multiple_of(size_of::<u64>()) {
            self.misuse(format!(
                "a signal at byte {offset} of a window: signals are aligned to 8 bytes"
            ));
        }
        // SAFETY: `address` has checked the window.
        (word.cast(), (unsafe { view(window) }.id, offset))
    }

    /// Posts an operation to world rank `peer`, once its queue has space.
    fn post(&self, peer: u32, transfer: Transfer, signal: Option<Add>, counter: Option<*mut u64>) {
        if self.gpus.removes(self.at) {
            return;
        }
        // A thread may be preempted here as before an access.
        if self.gpus.settings.preempt {
            self.thread.suspend(Wait::Ready);
        }
        let (queue, depth) = (self.queue(peer), self.gin.depth);
        let what = self.wait_for_peer(WaitKind::Request, 0, 0, peer);
        let space = Until::QueueSpace { queue, depth };
        // Another thread may take the queue space before this one runs.
        while !self.gpus.skips_wait(self.at) && !space.holds(self.gpus) {
            waits::until(self.thread, space, Order::Relaxed, what, None, self.at);
        }
        let (kernel, thread) = (self.thread.kernel(), self.thread.id());
        let to = self.gin.gpus[peer as usize] as usize;
        let bytes = match transfer {
            Transfer::Put { bytes, .. } | Transfer::Value { bytes, .. } => Some(bytes),
            Transfer::Nothing => Some(0),
            Transfer::Get { .. } => None,
        };
        if let Some(bytes) = bytes {
            self.gpus.traffic.put(self.thread.block().gpu, to, bytes);
        }
        let Grid { id, launch, uses_peers, .. } = &*self.thread.block().grid;
        if to != self.thread.block().gpu {
            uses_peers.set(true);
        }
        let releases = self.releases != Releases::Nothing;
        let by = Poster { kernel, grid: *id, thread, at: self.at, releases };
        let arguments = Rc::clone(&launch.arguments);
        let races = &self.gpus.memory.races;
        let [known, released] = races.post(&mut self.thread.race.borrow_mut(), self.releases);
        let operation = Operation { to, transfer, signal, counter, by, arguments, known, released };
        self.gpus.network.post(queue, operation);
        self.gpus.progress();
    }

    /// Runs `body` on the coop's first thread, between two synchronisations of the coop.
    ///
    /// # Safety
    ///
    /// `coop` is a coop.
    pub(super) unsafe fn once(
        &self,
        coop: *const CoopAny,
        name: &'static str,
        body: impl FnOnce(),
    ) {
        // SAFETY: the kernel passes a coop that it initialised.
        let (coop, rank) = unsafe { self.coop(coop) };
        self.sync(coop, name);
        if rank == 0 {
            body();
        }
        self.sync(coop, name);
    }

    /// Posts a signal without data. Called by the coop's first thread.
    ///
    /// # Safety
    ///
    /// The contract is that of [`add`](Self::add); `team` is a team.
    unsafe fn signal_peer(&self, team: *const Team, peer: i32, signal: Signal) {
        // SAFETY: the kernel passes a team.
        let peer = self.peer(unsafe { *team }, peer);
        // SAFETY: a window in `signal` is one that the host registered.
        let signal = unsafe { self.add(signal, peer) };
        if signal.is_some() {
            self.post(peer, Transfer::Nothing, signal, None);
        }
    }

    /// Posts an increment of world rank `peer`'s signal `id`. If it `fences`, it has the default
    /// strength, and else it is weak.
    pub(super) fn increment(&self, id: u32, peer: u32, fences: bool) {
        let signal = Signal::Indexed { id, strong: fences && self.gin.strong, op: 0, arg: 1 };
        // SAFETY: there is no window.
        let signal = unsafe { self.add(signal, peer) };
        self.post(peer, Transfer::Nothing, signal, None);
    }

    /// Posts a put; `dst` and `src` are windows and offsets. Called by the coop's first thread.
    ///
    /// # Safety
    ///
    /// The contract is that of [`add`](Self::add), for all windows; `team` is a team.
    unsafe fn put(
        &self,
        (team, peer): (*const Team, i32),
        dst: (*mut c_void, usize),
        src: (*mut c_void, usize),
        bytes: usize,
        signal: Signal,
        counter: Option<u32>,
    ) {
        // SAFETY: the kernel passes a coop, a team and windows that it got or initialised.
        unsafe {
            let peer = self.peer(*team, peer);
            let from = self.address("a put from", src.0, src.1, bytes, self.handle.rank);
            let to = self.address("a put to", dst.0, dst.1, bytes, peer);
            let counter = counter.map(|id| self.own_rank().counters[self.counter(id)].as_ptr());
            let signal = self.add(signal, peer);
            self.post(peer, Transfer::Put { from, to, bytes }, signal, counter);
        }
    }

    /// Posts a put of the low `bytes` bytes of `value`. Called by the coop's first thread.
    ///
    /// # Safety
    ///
    /// The contract is that of [`add`](Self::add), for all windows; `team` is a team.
    unsafe fn put_value(
        &self,
        (team, peer): (*const Team, i32),
        dst: (*mut c_void, usize),
        (value, bytes): (u64, usize),
        signal: Signal,
    ) {
        if !matches!(bytes, 1 | 2 | 4 | 8) {
            self.misuse(format!("a put of a value of {bytes} bytes: 1, 2, 4 and 8 are possible"));
        }
        // SAFETY: the kernel passes a coop, a team and windows that it got or initialised.
        unsafe {
            let peer = self.peer(*team, peer);
            let to = self.address("a put to", dst.0, dst.1, bytes, peer);
            let signal = self.add(signal, peer);
            let transfer = Transfer::Value { value: value.to_le_bytes(), to, bytes };
            self.post(peer, transfer, signal, None);
        }
    }
}

/// Declares functions that run `body` on the coop's first thread.
macro_rules! functions {
    ($($name:ident($($arg:ident: $type:ty),*) = $label:literal, $call:ident,
       $coop:ident => $body:expr;)*) => { $(
        #[allow(clippy::too_many_arguments, reason = "NCCL's signature")]
        pub(in crate::gpu::nccl) unsafe extern "C-unwind" fn $name(
            net: *mut Gin, $($arg: $type),*
        ) {
            // SAFETY: the kernel passes a handle, a coop, a team and windows.
            unsafe {
                let $call = Call::on(net);
                $call.once($coop, $label, || $body);
            }
        }
    )* };
}

functions! {
    put(
        team: *const Team, peer: i32, dst_win: *mut c_void, dst_offset: usize,
        src_win: *mut c_void, src_offset: usize, bytes: usize, is_signal: bool, id: u32, op: i32,
        arg: u64, is_counter: bool, counter: u32, coop: *const CoopAny, _is_descriptor: bool,
        _descriptor: *mut GinDescriptorSmem, given: i32, required: i32
    ) = "a put", call, coop => call.release(given, required).put(
        (team, peer), (dst_win, dst_offset), (src_win, src_offset), bytes,
        call.legacy(is_signal, id, op, arg), is_counter.then_some(counter),
    );
    put_v2(
        team: *const Team, peer: i32, dst_win: *mut c_void, dst_offset: usize,
        src_win: *mut c_void, src_offset: usize, bytes: usize, is_signal: bool, id: u32, op: i32,
        arg: u64, is_counter: bool, counter: u32, coop: *const CoopAny, _is_descriptor: bool,
        _descriptor: *mut GinDescriptorSmem, given: i32, required: i32, _flags: u32
    ) = "a put", call, coop => call.release(given, required).put(
        (team, peer), (dst_win, dst_offset), (src_win, src_offset), bytes,
        call.legacy(is_signal, id, op, arg), is_counter.then_some(counter),
    );
    put_v3(
        team: *const Team, peer: i32, dst_win: *mut c_void, dst_offset: usize,
        src_win: *mut c_void, src_offset: usize, bytes: usize, signal_type: i32,
        signal_win: *mut c_void, signal_offset: usize, id: u32, strong: bool, op: i32, arg: u64,
        is_counter: bool, counter: u32, coop: *const CoopAny, _is_descriptor: bool,
        _descriptor: *mut GinDescriptorSmem, given: i32, required: i32, _flags: u32, _segment: i32
    ) = "a put", call, coop => call.release(given, required).put(
        (team, peer), (dst_win, dst_offset), (src_win, src_offset), bytes,
        call.signal_of_type(signal_type, signal_win, signal_offset, id, strong, (op, arg)),
        is_counter.then_some(counter),
    );
    put_value(
        team: *const Team, peer: i32, dst_win: *mut c_void, dst_offset: usize, value: u64,
        size: usize, is_signal: bool, id: u32, op: i32, arg: u64, coop: *const CoopAny,
        _is_descriptor: bool, _descriptor: *mut GinDescriptorSmem, given: i32, required: i32
    ) = "a put of a value", call, coop => call.release(given, required).put_value(
        (team, peer), (dst_win, dst_offset), (value, size), call.legacy(is_signal, id, op, arg),
    );
    put_value_v2(
        team: *const Team, peer: i32, dst_win: *mut c_void, dst_offset: usize, value: u64,
        size: usize, is_signal: bool, id: u32, op: i32, arg: u64, coop: *const CoopAny,
        _is_descriptor: bool, _descriptor: *mut GinDescriptorSmem, given: i32, required: i32,
        _flags: u32
    ) = "a put of a value", call, coop => call.release(given, required).put_value(
        (team, peer), (dst_win, dst_offset), (value, size), call.legacy(is_signal, id, op, arg),
    );
    put_value_v3(
        team: *const Team, peer: i32, dst_win: *mut c_void, dst_offset: usize, value: u64,
        size: usize, signal_type: i32, signal_win: *mut c_void, signal_offset: usize, id: u32,
        strong: bool, op: i32, arg: u64, coop: *const CoopAny, _is_descriptor: bool,
        _descriptor: *mut GinDescriptorSmem, given: i32, required: i32, _flags: u32
    ) = "a put of a value", call, coop => call.release(given, required).put_value(
        (team, peer), (dst_win, dst_offset), (value, size),
        call.signal_of_type(signal_type, signal_win, signal_offset, id, strong, (op, arg)),
    );
    signal(
        team: *const Team, peer: i32, is_signal: bool, id: u32, op: i32, arg: u64,
        coop: *const CoopAny, _is_descriptor: bool, _descriptor: *mut GinDescriptorSmem,
        given: i32, required: i32
    ) = "a signal", call, coop => call.release(given, required).signal_peer(
        team, peer, call.legacy(is_signal, id, op, arg),
    );
    signal_v2(
        team: *const Team, peer: i32, is_signal: bool, id: u32, op: i32, arg: u64,
        coop: *const CoopAny, _is_descriptor: bool, _descriptor: *mut GinDescriptorSmem,
        given: i32, required: i32, _flags: u32
    ) = "a signal", call, coop => call.release(given, required).signal_peer(
        team, peer, call.legacy(is_signal, id, op, arg),
    );
    signal_v3(
        team: *const Team, peer: i32, signal_type: i32, signal_win: *mut c_void,
        signal_offset: usize, id: u32, strong: bool, op: i32, arg: u64, coop: *const CoopAny,
        _is_descriptor: bool, _descriptor: *mut GinDescriptorSmem, given: i32, required: i32,
        _flags: u32
    ) = "a signal", call, coop => call.release(given, required).signal_peer(
        team, peer,
        call.signal_of_type(signal_type, signal_win, signal_offset, id, strong, (op, arg)),
    );
    get(
        team: *const Team, peer: i32, remote_win: *mut c_void, remote_offset: usize,
        local_win: *mut c_void, local_offset: usize, bytes: usize, coop: *const CoopAny,
        _is_descriptor: bool, _descriptor: *mut GinDescriptorSmem, _flags: u32
    ) = "a get", call, coop => call.get(
        (team, peer), (remote_win, remote_offset), (local_win, local_offset), bytes,
    );
    get_v2(
        team: *const Team, peer: i32, remote_win: *mut c_void, remote_offset: usize,
        local_win: *mut c_void, local_offset: usize, bytes: usize, coop: *const CoopAny,
        _is_descriptor: bool, _descriptor: *mut GinDescriptorSmem, _flags: u32, _segment: i32
    ) = "a get", call, coop => call.get(
        (team, peer), (remote_win, remote_offset), (local_win, local_offset), bytes,
    );
}

impl Call<'_> {
    /// Posts a get. Called by the coop's first thread.
    ///
    /// # Safety
    ///
    /// Windows are NULL or windows; `team` is a team.
    unsafe fn get(
        &self,
        (team, peer): (*const Team, i32),
        remote: (*mut c_void, usize),
        local: (*mut c_void, usize),
        bytes: usize,
    ) {
        // SAFETY: the kernel passes a coop, a team and windows that it got or initialised.
        unsafe {
            let peer = self.peer(*team, peer);
            let from = self.address("a get from", remote.0, remote.1, bytes, peer);
            let to = self.address("a get to", local.0, local.1, bytes, self.handle.rank);
            self.post(peer, Transfer::Get { from, to, bytes }, None, None);
        }
    }
}
