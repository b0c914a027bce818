//! Flushes, and reads, waits and resets of counters and signals.

use std::ffi::c_void;

use cuda_std::arch::Order;
use devcomm_types::nccl::{CoopAny, Gin, GinDescriptorSmem, GinRequest, Team};
use devcomm_types::{WaitFor, WaitKind};

use super::Call;
use super::network::QueueKey;
use crate::gpu::nccl::lsa_barrier::acquire_half;
use crate::gpu::thread::Wait;
use crate::gpu::waits::{self, Until};

const SUCCESS: i32 = 0;
/// NCCL: `ncclTimeout`.
const TIMEOUT: i32 = 8;

/// The tag of a request, in the upper 32 bits. The lower bits have the peer's rank.
const REQUEST: u64 = 0x6e63_636c << 32;

impl Call<'_> {
    /// Returns the acquire half of the C++ memory order that the kernel passed for a wait or read,
    /// with a mutation's change.
    pub(super) fn order(&self, order: i32) -> Order {
        let order = acquire_half(order);
        let at = self.thread.state.line_of(self.at);
        self.gpus.change_at(at).map_or(order, |change| change.order(order))
    }

    /// Waits for `until`. A timeout of 0 cycles polls once; a longer one expires only if nothing
    /// else can make progress.
    fn wait(&self, until: Until, order: Order, what: WaitFor, timeout: Option<u64>) -> i32 {
        if self.gpus.skips_wait(self.at) {
            return SUCCESS;
        }
        if timeout == Some(0) {
            self.thread.suspend(Wait::Spin { at: self.at, plain: false });
            if !until.holds(self.gpus) {
                return TIMEOUT;
            }
            until.acquire(self.thread, order);
            return SUCCESS;
        }
        // A cycle counts as a nanosecond.
        let deadline = timeout.map(|cycles| self.gpus.clock.get().saturating_add(cycles));
        match waits::until(self.thread, until, order, what, deadline, self.at) {
            true => SUCCESS,
            false => TIMEOUT,
        }
    }

    /// Checks the number of significant bits of a value.
    pub(super) fn bits(&self, bits: i32) -> u32 {
        match bits {
            1..=64 => bits as u32,
            _ => self.misuse(format!("a value of {bits} bits: 1 to 64 are possible")),
        }
    }

    /// Returns the condition that all operations posted to a queue so far are complete.
    fn all_of(&self, queue: QueueKey, gets: bool) -> Until {
        Until::Complete { queue, before: self.gpus.network.next(queue), gets }
    }

    /// Waits for this context's operations to the peers that thread `rank` of `size` threads
    /// handles; with `gets`, also until the data of gets has arrived.
    fn flush_share(
        &self,
        (rank, size): (u32, u32),
        order: Order,
        gets: bool,
        timeout: Option<u64>,
    ) -> i32 {
        for peer in (rank..self.gin.gpus.len() as u32).step_by(size.max(1) as usize) {
            let what = self.wait_for_peer(WaitKind::Flush, 0, 0, peer);
            let result = self.wait(self.all_of(self.queue(peer), gets), order, what, timeout);
            if result != SUCCESS {
                return result;
            }
        }
        SUCCESS
    }

    /// Waits until this context's operations to world rank `peer` are complete.
    pub(super) fn flush_peer(&self, peer: u32, order: Order) {
        let what = self.wait_for_peer(WaitKind::Request, 0, 0, peer);
        self.wait(self.all_of(self.queue(peer), true), order, what, None);
    }

    /// Flushes this context; the coop's threads share the peers. `gets` and `timeout` are those of
    /// [`flush_share`](Self::flush_share).
    ///
    /// # Safety
    ///
    /// `coop` is a coop.
    pub(super) unsafe fn flush(
        &self,
        coop: *const CoopAny,
        order: Order,
        gets: bool,
        timeout: Option<u64>,
    ) -> i32 {
        const NAME: &str = "a flush";
        // SAFETY: the kernel passes a coop that it initialised.
        let (coop, rank) = unsafe { self.coop(coop) };
        self.sync(coop, NAME);
        let result = self.flush_share((rank, coop.size(self.thread)), order, gets, timeout);
        self.sync(coop, NAME);
        result
    }

    /// Waits for a value on the coop's first thread; the other threads return success.
    ///
    /// # Safety
    ///
    /// `coop` is a coop.
    unsafe fn wait_value(
        &self,
        coop: *const CoopAny,
        name: &'static str,
        word: *const u64,
        what: WaitFor,
        (bits, order): (i32, i32),
        timeout: Option<u64>,
    ) -> i32 {
        let mut result = SUCCESS;
        let bits = self.bits(bits);
        // SAFETY: the kernel passes a coop that it initialised.
        unsafe {
            self.once(coop, name, || {
                let until = Until::Reached { word, least: what.wanted, bits };
                result = self.wait(until, self.order(order), what, timeout);
            });
        }
        result
    }

    /// Waits on this thread until signal `id` of a barrier has reached `least`, in 32 bits.
    pub(super) fn wait_barrier(&self, id: u32, least: u32, order: Order, what: WaitFor) {
        let word = self.own_rank().signals[self.signal(id)].as_ptr();
        let until = Until::Reached { word, least: least.into(), bits: 32 };
        self.wait(until, order, what, None);
    }

    /// Reads a word that other threads change; yields, since the caller may be polling it.
    fn read(&self, word: *const u64, bits: i32, order: i32) -> u64 {
        let mask = u64::MAX >> (64 - self.bits(bits));
        self.thread.suspend(Wait::Spin { at: self.at, plain: false });
        let (memory, order) = (&self.gpus.memory, self.order(order));
        memory.races.read_from(
            memory.as_ref(),
            &mut self.thread.race.borrow_mut(),
            word.addr(),
            order,
        );
        // SAFETY: it is a signal or counter of the device communicator, or checked in a window.
        (unsafe { word.read_volatile() }) & mask
    }

    /// Waits for the operations of a request on the coop's first thread.
    ///
    /// # Safety
    ///
    /// `request` points to a request.
    unsafe fn wait_request(
        &self,
        coop: *const CoopAny,
        request: *const GinRequest,
        order: i32,
        timeout: Option<u64>,
    ) -> i32 {
        let mut result = SUCCESS;
        // SAFETY: the caller's contract; the kernel passes a coop.
        unsafe {
            self.once(coop, "a wait for a flush", || {
                let GinRequest([peer, before]) = *request;
                if peer & !u64::from(u32::MAX) != REQUEST
                    || peer as u32 >= self.gin.gpus.len() as u32
                {
                    self.misuse("the request was not made by ncclGinFlushAsync");
                }
                let what = self.wait_for_peer(WaitKind::Request, 0, 0, peer as u32);
                let queue = self.queue(peer as u32);
                let until = Until::Complete { queue, before, gets: true };
                result = self.wait(until, self.order(order), what, timeout);
            });
        }
        result
    }
}

pub(in crate::gpu::nccl) unsafe extern "C-unwind" fn flush(
    net: *mut Gin,
    coop: *const CoopAny,
    ord: i32,
) {
    // SAFETY: the kernel passes a handle and a coop.
    unsafe {
        let call = Call::on(net);
        call.flush(coop, call.order(ord), true, None);
    }
}

/// Declares each of NCCL's waits twice: without a timeout, and with one in cycles.
macro_rules! waits {
    ($( $plain:ident, $timed:ident($($arg:ident: $type:ty),*)
        = |$call:ident, $timeout:ident| $wait:expr; )*) => { $(
        pub(in crate::gpu::nccl) unsafe extern "C-unwind" fn $plain(
            net: *mut Gin, $($arg: $type),*
        ) {
            // SAFETY: the kernel passes a handle, a coop, and valid pointers.
            unsafe {
                let ($call, $timeout) = (Call::on(net), None);
                $wait;
            }
        }

        #[allow(clippy::too_many_arguments, reason = "NCCL's signature")]
        pub(in crate::gpu::nccl) unsafe extern "C-unwind" fn $timed(
            net: *mut Gin,
            $($arg: $type,)*
            timeout: u64,
        ) -> i32 {
            // SAFETY: the kernel passes a handle, a coop, and valid pointers.
            unsafe {
                let ($call, $timeout) = (Call::on(net), Some(timeout));
                $wait
            }
        }
    )* };
}

waits! {
    // PROXY's flush with a timeout does not wait until the data of gets is visible.
    flush_v2, flush_timeout(
        coop: *const CoopAny, ord: i32, _is_descriptor: bool, _descriptor: *mut GinDescriptorSmem
    ) = |call, timeout| call.flush(coop, call.order(ord), timeout.is_none(), timeout);
    wait, wait_timeout(
        request: *mut GinRequest, coop: *const CoopAny, _is_descriptor: bool,
        _descriptor: *mut GinDescriptorSmem, ord: i32
    ) = |call, timeout| call.wait_request(coop, request, ord, timeout);
    wait_counter, wait_counter_timeout(
        coop: *const CoopAny, counter: u32, least: u64, bits: i32, ord: i32
    ) = |call, timeout| {
        let word = call.own_rank().counters[call.counter(counter)].as_ptr();
        let what = call.wait_for(WaitKind::Counter, counter, least);
        call.wait_value(coop, "a wait for a counter", word, what, (bits, ord), timeout)
    };
    wait_signal, wait_signal_timeout(
        coop: *const CoopAny, signal: u32, least: u64, bits: i32, ord: i32
    ) = |call, timeout| {
        let word = call.own_rank().signals[call.signal(signal)].as_ptr();
        let what = call.wait_for(WaitKind::Signal, signal, least);
        call.wait_value(coop, "a wait for a signal", word, what, (bits, ord), timeout)
    };
    wait_signal_va, wait_signal_timeout_va(
        coop: *const CoopAny, window: *mut c_void, offset: usize, least: u64, bits: i32, ord: i32
    ) = |call, timeout| {
        let (word, _) = call.va_word(window, offset, call.handle.rank);
        let what = call.wait_for(WaitKind::VaSignal, (offset / 8) as u32, least);
        call.wait_value(coop, "a wait for a signal", word, what, (bits, ord), timeout)
    };
}

#[allow(clippy::too_many_arguments, reason = "NCCL's signature")]
pub(in crate::gpu::nccl) unsafe extern "C-unwind" fn flush_async(
    net: *mut Gin,
    team: *const Team,
    peer: u32,
    request: *mut GinRequest,
    coop: *const CoopAny,
    _flags: u32,
    _is_descriptor: bool,
    _descriptor: *mut GinDescriptorSmem,
) {
    // SAFETY: the kernel passes a handle, a team, a coop and memory for a request.
    unsafe {
        let call = Call::on(net);
        call.once(coop, "the start of a flush", || {
            let peer = call.peer(*team, peer as i32);
            let before = call.gpus.network.next(call.queue(peer));
            request.write(GinRequest([REQUEST | u64::from(peer), before]));
        });
    }
}

pub(in crate::gpu::nccl) unsafe extern "C-unwind" fn read_counter(
    net: *mut Gin,
    counter: u32,
    bits: i32,
    ord: i32,
) -> u64 {
    // SAFETY: the kernel passes a handle.
    let call = unsafe { Call::on(net) };
    call.read(call.own_rank().counters[call.counter(counter)].as_ptr(), bits, ord)
}

pub(in crate::gpu::nccl) unsafe extern "C-unwind" fn reset_counter(net: *mut Gin, counter: u32) {
    // SAFETY: the kernel passes a handle.
    let call = unsafe { Call::on(net) };
    let cell = &call.own_rank().counters[call.counter(counter)];
    if call.gpus.network.will_change(cell.as_ptr()) {
        call.misuse(format!("counter {counter} is reset while a put that it counts is under way"));
    }
    cell.set(0);
    call.gpus.progress();
}

pub(in crate::gpu::nccl) unsafe extern "C-unwind" fn read_signal(
    net: *mut Gin,
    signal: u32,
    bits: i32,
    ord: i32,
) -> u64 {
    // SAFETY: the kernel passes a handle.
    let call = unsafe { Call::on(net) };
    call.read(call.own_rank().signals[call.signal(signal)].as_ptr(), bits, ord)
}

pub(in crate::gpu::nccl) unsafe extern "C-unwind" fn read_signal_va(
    net: *mut Gin,
    window: *mut c_void,
    offset: usize,
    bits: i32,
    ord: i32,
) -> u64 {
    // SAFETY: the kernel passes a handle and a window.
    unsafe {
        let call = Call::on(net);
        call.read(call.va_word(window, offset, call.handle.rank).0, bits, ord)
    }
}

pub(in crate::gpu::nccl) unsafe extern "C-unwind" fn reset_signal_va(
    net: *mut Gin,
    window: *mut c_void,
    offset: usize,
) {
    // SAFETY: the kernel passes a handle and a window, in which the word was checked.
    unsafe {
        let call = Call::on(net);
        let (word, key) = call.va_word(window, offset, call.handle.rank);
        if call.gpus.network.will_change(word) {
            call.misuse(format!(
                "the signal at byte {offset} of a window is reset while an operation that \
                signals it is under way"
            ));
        }
        word.write_volatile(0);
        call.own_rank().va_ops.borrow_mut().remove(&key);
        call.gpus.progress();
    }
}
