//! The simulator's implementation of cuda_std's operations: the [`Ops`] table.
//!
//! # Safety
//!
//! The scheduler sets [`CTX`](cuda_std::arch::CTX) only to the address of a [`Thread`] of a live
//! [`Gpus`](crate::gpu::gpus::Gpus), with the provenance of the whole object. The operations
//! (*hooks*) run only on the current thread's coroutine. So the cast of the context's address back
//! to the thread is sound, and so is the thread's pointer to the GPUs, which outlive all
//! coroutines. All mutable state of threads and GPUs is in cells, so no exclusive references exist.

mod scratch;

use corosensei::Yielder;
use cuda_std::arch::{Access, Engine, Event, MulticastParts, Ops, Order, Scope, Space, ThreadCtx};

use crate::base::error::{Error, Site};
use crate::base::mutation::Change;
use crate::base::owner::Registry;
use crate::gpu::barrier;
use crate::gpu::cluster;
use crate::gpu::nccl;
use crate::gpu::registers;
use crate::gpu::shared::MAX_STATIC;
use crate::gpu::thread::{Thread, Wait};
use crate::gpu::warp::{self, Lane, Op};
use crate::memory::multicast;

/// The number of accesses after which a thread yields, so that a thread that polls without
/// declaring it does not block the others. It is large, as a switch costs far more than an access.
pub(crate) const SLICE: u64 = 1 << 16;

impl Thread {
    /// Returns the thread whose context is at `ctx`.
    #[inline(always)]
    pub(crate) fn of<'a>(ctx: *const ThreadCtx) -> &'a Thread {
        // SAFETY: as the module explains, the context is the first field of a running thread.
        unsafe { &*ctx.cast::<Thread>() }
    }

    /// Returns the running thread. Must be called on a coroutine.
    pub(crate) fn current<'a>() -> &'a Thread {
        Self::of(cuda_std::arch::CTX.get())
    }

    /// Suspends this thread until the scheduler resumes it.
    #[inline]
    pub(crate) fn suspend(&self, wait: Wait) {
        if self.unwinding.get() && !matches!(wait, Wait::Failed | Wait::Exited) {
            // The kernel has panicked and is unwinding: its waits return at once.
            return;
        }
        self.wait.set(wait);
        // SAFETY: this coroutine set its yielder when it started; it lives as long as the stack.
        unsafe { Yielder::suspend(&*self.yielder.get(), ()) };
    }

    /// Yields, if the order of threads is random, after a barrier at which this thread arrived
    /// last. Otherwise it would always go on before the threads that it has woken.
    pub(crate) fn arrived_last(&self) {
        if self.gpus().random() {
            self.suspend(Wait::Ready);
        }
    }
}

fn exit(ctx: *const ThreadCtx) -> ! {
    let thread = Thread::of(ctx);
    loop {
        thread.suspend(Wait::Exited);
    }
}

fn shared_static(ctx: *const ThreadCtx, key: usize, size: usize, at: Site) -> *mut u8 {
    let thread = Thread::of(ctx);
    thread.gpus().called();
    let found = thread.block().shared.borrow_mut().of_static(key, size, Some(at));
    found.unwrap_or_else(|| {
        let (kernel, who) = (thread.kernel(), thread.id());
        thread.fail(Error::SharedMemory { kernel, thread: who, bytes: size, limit: MAX_STATIC })
    })
}

impl Thread {
    /// Applies a mutation of the line `at` to an access; returns whether it removes the access.
    #[inline(always)]
    fn mutate(&self, address: &mut usize, bytes: usize, access: &mut Access, at: Site) -> bool {
        match self.gpus().change_at(at) {
            None => {}
            Some(Change::Remove) => return true,
            Some(Change::Shift(by)) => {
                *address = address.wrapping_add_signed(by * bytes as isize);
            }
            Some(change) => *access = change.access(*access),
        }
        false
    }

    /// Fails the thread if it may not access the memory, and counts the traffic; returns whether it
    /// is global memory.
    #[inline(always)]
    fn check_bounds(&self, address: usize, bytes: usize, access: Access, at: Site) -> bool {
        let (gpus, gpu) = (self.gpus(), self.block().gpu as u32);
        let mut is_global = gpus.memory.was_found(gpu, address, bytes);
        if !is_global && !self.owns(address, bytes) {
            is_global = gpus.memory.contains(gpu, address, bytes);
            if !is_global {
                out_of_bounds(self, address, bytes, access, at);
            }
        }
        if is_global && access != Access::ReadByOther {
            gpus.traffic.access(&gpus.memory, gpu as usize, (address, bytes), access);
        }
        is_global
    }

    /// Checks the access that the thread makes next: fails the thread if it may not access the
    /// memory, and may yield. Returns the address to access.
    #[inline(always)]
    pub(crate) fn access(
        &self,
        mut address: usize,
        bytes: usize,
        mut access: Access,
        at: Site,
    ) -> usize {
        let (gpus, at) = (self.gpus(), self.state.line_of(at));
        if self.mutate(&mut address, bytes, &mut access, at) {
            return self.removed(bytes, access, at);
        }
        gpus.accesses.set(gpus.accesses.get() + 1);
        let is_global = self.check_bounds(address, bytes, access, at);
        // Another thread of the warpgroup reports the load of this operand.
        if access == Access::ReadByOther {
            return address;
        }
        self.begin_access((address, bytes), access, at);
        // No other thread runs between these checks and the access.
        self.check_access((address, bytes), is_global, access, at, &|n| gpus.chosen(n))
    }

    /// Checks an access for races, or that of an `mbarrier`; returns the address to access, where
    /// `choose` selects the old value that an atomic load sees: 0 is the newest one.
    #[inline(always)]
    fn check_access(
        &self,
        (address, bytes): (usize, usize),
        is_global: bool,
        access: Access,
        at: Site,
        choose: &dyn Fn(usize) -> usize,
    ) -> usize {
        if let Access::BarrierTest | Access::BarrierChange = access {
            self.check_barrier(address, at);
        } else if self.gpus().settings.races && (is_global || !self.is_on_stack(address)) {
            let space = if is_global { Space::Global } else { Space::Shared };
            let unwritten = self.unwritten((address, bytes, space), access);
            let seen = self.check_race((address, bytes, space), access, at, choose);
            if let Some(unwritten) = unwritten {
                self.reads_unwritten(unwritten, at);
            }
            return seen;
        }
        address
    }

    /// Fails the thread if the access races; returns the address to access.
    #[inline]
    fn check_race(
        &self,
        place: (usize, usize, Space),
        access: Access,
        at: Site,
        choose: &dyn Fn(usize) -> usize,
    ) -> usize {
        let gpus = self.gpus();
        let memory = &gpus.memory;
        let mut clock = self.race.borrow_mut();
        match memory.races.access(memory.as_ref(), &mut clock, place, access, at, choose) {
            Ok([None, None, None, None]) => place.0,
            Ok(old) => self.stale((place.0, place.1), old),
            Err(found) => {
                drop(clock);
                let shared = |address| self.shared_place(address);
                self.fail(Error::Race(memory.races.report(memory.as_ref(), &found, shared)));
            }
        }
    }

    /// Fails the thread if the `mbarrier` that it uses may not be initialised.
    fn check_barrier(&self, address: usize, at: Site) {
        let races = &self.gpus().memory.races;
        let checked = races.check_barrier(&self.race.borrow(), address);
        if let Err(why) = checked {
            let place = self.shared_place(address);
            self.misuse(at, format!("it uses the mbarrier at {place}, {why}"));
        }
    }

    /// Returns the first byte that the access reads and that nothing has written, if the memory is
    /// shared memory or has been allocated by NCCL.
    #[inline]
    fn unwritten(
        &self,
        (address, bytes, space): (usize, usize, Space),
        access: Access,
    ) -> Option<usize> {
        let (Access::Read | Access::AtomicRead(..) | Access::AtomicRmw(..)) = access else {
            return None;
        };
        let memory = &self.gpus().memory;
        let unwritten = memory.races.unwritten(memory.as_ref(), address, bytes)?;
        (space == Space::Shared || memory.is_of_nccl(unwritten)).then_some(unwritten)
    }

    /// Remembers the block's first read of memory that nothing has written: an error when the block
    /// has ended, unless a write that comes too late shows that they race.
    #[cold]
    fn reads_unwritten(&self, unwritten: usize, at: Site) {
        let place = match self.gpus().memory.owner_at(unwritten) {
            Some((owner, offset)) => self.arguments().locate(owner, offset),
            None => self.shared_place(unwritten),
        };
        self.block().unwritten.borrow_mut().get_or_insert_with(|| {
            self.misuse_error(at, format!("it reads {place}, which nothing has written"))
        });
    }

    /// Returns the name of a byte of shared memory.
    pub(crate) fn shared_place(&self, address: usize) -> String {
        match self.block().shared.borrow().place(address) {
            Some(place) => place.to_string(),
            None => "the shared memory of another block of the cluster".to_owned(),
        }
    }

    /// Returns whether the address is in the thread's own stack.
    #[inline]
    fn is_on_stack(&self, address: usize) -> bool {
        let (low, high) = self.stack();
        (low..high).contains(&address)
    }

    /// Returns whether the bytes are in the shared memory of the block or its cluster, or in the
    /// thread's own stack.
    #[inline(never)]
    fn owns(&self, address: usize, bytes: usize) -> bool {
        let (low, high) = self.stack();
        (address >= low && address <= high && bytes <= high - address)
            || self.block().shared.borrow().contains(address, bytes)
            || self.block().cluster.contains(address, bytes)
    }
}

#[cold]
fn out_of_bounds(thread: &Thread, address: usize, bytes: usize, access: Access, at: Site) -> ! {
    let access = match access {
        Access::Read | Access::ReadByOther | Access::AtomicRead(..) | Access::BarrierTest => {
            "loads"
        }
        Access::Write | Access::AtomicWrite(..) => "stores",
        Access::AtomicRmw(..) | Access::BarrierChange => "updates",
    };
    if multicast::is_multicast(address) {
        thread.misuse(
            at,
            format!(
                "it {access} {bytes} bytes at {address:#x}, a multicast address, which is for \
            multimem instructions only"
            ),
        );
    }
    let shared = thread.block().shared.borrow().nearest(address);
    let other = thread.gpus().memory.distance(address);
    let where_to = match shared.filter(|(distance, _)| other.is_none_or(|other| *distance < other))
    {
        Some((_, where_to)) => where_to,
        None => nccl::describe(thread, address),
    };
    let (kernel, who) = (thread.kernel(), thread.id());
    thread.fail(Error::OutOfBounds { kernel, thread: who, access, bytes, address, where_to, at })
}

impl Thread {
    /// Checks an access to a multicast address, and returns the copies of the bytes, one per GPU of
    /// the group. One instruction accesses all copies: no other thread runs meanwhile, and it sees
    /// no old values.
    pub(crate) fn multimem(
        &self,
        mut address: usize,
        bytes: usize,
        mut access: Access,
        at: Site,
    ) -> MulticastParts {
        let (gpus, at) = (self.gpus(), self.state.line_of(at));
        if self.mutate(&mut address, bytes, &mut access, at) {
            let first = std::ptr::with_exposed_provenance_mut(self.removed(bytes, access, at));
            return MulticastParts { first, stride: 0, n: 1 };
        }
        gpus.accesses.set(gpus.accesses.get() + 1);
        let parts = match gpus.memory.multicast.parts(self.block().gpu, address, bytes) {
            Ok(parts) => parts,
            Err(why) => self.misuse(at, format!("a multimem instruction: {why}")),
        };
        self.begin_access((address, bytes), access, at);
        if let Access::AtomicRmw(..) = access {
            // A reduction is not a lock's attempt: it changes memory also if a poll follows it.
            gpus.progress();
        }
        for i in (0..parts.n).filter(|_| gpus.settings.watch) {
            let copy = parts.first.wrapping_add(i * parts.stride).addr();
            let is_global = self.check_bounds(copy, bytes, access, at);
            self.check_access((copy, bytes), is_global, access, at, &|_| 0);
        }
        parts
    }
}

fn spin(ctx: *const ThreadCtx, at: Site) {
    let thread = Thread::of(ctx);
    // The thread spins because its last read-modify-write changed nothing.
    thread.updating.set(false);
    thread.suspend(Wait::Spin { at, plain: false });
}

fn wait_phase(ctx: *const ThreadCtx, barrier: usize, parity: u32, at: Site) {
    Thread::of(ctx).suspend(Wait::Phase { barrier, parity, at });
}

fn print(ctx: *const ThreadCtx, text: &str) {
    let gpus = Thread::of(ctx).gpus();
    gpus.called();
    gpus.printed.borrow_mut().push_str(text);
}

/// The simulated nanoseconds per clock read. They are many, so that a kernel that waits for a time
/// reads the clock few times.
const CLOCK_READ: u64 = 1000;

fn clock(ctx: *const ThreadCtx) -> u64 {
    let thread = Thread::of(ctx);
    // A thread that waits for a time is not livelocked.
    let gpus = thread.gpus();
    gpus.progress();
    let now = gpus.clock.get();
    gpus.clock.set(now.saturating_add(CLOCK_READ));
    thread.suspend(Wait::Ready);
    now
}

fn fence(ctx: *const ThreadCtx, order: Order, scope: Scope, at: Site) {
    let thread = Thread::of(ctx);
    let fence = match thread.gpus().change_at(at) {
        None => Some((order, scope)),
        Some(change) => change.fence(order, scope),
    };
    let Some((order, scope)) = fence else { return };
    thread.gpus().memory.races.fence(&mut thread.race.borrow_mut(), order, scope);
}

fn event(ctx: *const ThreadCtx, event: Event, at: Site) {
    let thread = Thread::of(ctx);
    let gpus = thread.gpus();
    match event {
        Event::Commit(_) | Event::BarrierInit(_) if gpus.removes(at) => return,
        Event::ProxyFence(_) | Event::BarrierFence | Event::RegisterFence
            if matches!(gpus.change_at(at), Some(Change::Remove | Change::Relax)) =>
        {
            return;
        }
        Event::Wait { .. } if gpus.skips_wait(at) => return,
        _ => {}
    }
    thread.end_copies(&event);
    match event {
        Event::Commit(Engine::Wgmma) => thread.products.borrow_mut().commit(),
        Event::RegisterFence => thread.products.borrow_mut().fence(),
        Event::Wait { engine: Engine::Wgmma, pending, .. } => {
            thread.products.borrow_mut().wait(pending);
        }
        _ => {}
    }
    match event {
        // The threads that are woken test the barrier again, which an `init` changes too.
        Event::BarrierArrive { barrier, ends: true }
        | Event::BarrierTransaction { barrier, ends: true }
        | Event::BarrierInit(barrier) => thread.block().cluster.phase_ended(barrier),
        _ => {}
    }
    let mbarrier_number = || {
        let count = &thread.block().mbarriers;
        count.replace(count.get() + 1)
    };
    gpus.memory.races.event(&mut thread.race.borrow_mut(), event, at, mbarrier_number);
}

/// cuda_std's operations. Threads run one at a time, so that memory itself is sequentially
/// consistent. What fences order matters to the detection of [races](crate::race), and to the old
/// values that weak loads see.
pub(crate) static OPS: Ops = Ops {
    barrier: |ctx, id, count, at| barrier::arrive(Thread::of(ctx), id, count, None, at),
    sync_warp: |ctx, mask, at| {
        warp::converge(Thread::of(ctx), mask, Op::Sync, Lane::default(), None, at);
    },
    shuffle: |ctx, mask, kind, value, operand, width, at| {
        let mine = Lane { value, operand, width };
        warp::converge(Thread::of(ctx), mask, Op::Shuffle(kind), mine, None, at)
    },
    ballot: |ctx, mask, predicate, at| {
        let mine = Lane { value: predicate.into(), ..Lane::default() };
        warp::converge(Thread::of(ctx), mask, Op::Ballot, mine, None, at).0
    },
    exchange: |ctx, words, at| warp::exchange(Thread::of(ctx), words, at),
    shared_static,
    access: |ctx, address, bytes, access, at| Thread::of(ctx).access(address, bytes, access, at),
    keeps: |ctx, engine, piece, at| Thread::of(ctx).keeps_piece(engine, piece, at),
    multimem: |ctx, address, bytes, access, at| {
        Thread::of(ctx).multimem(address, bytes, access, at)
    },
    spin,
    wait_phase,
    set_registers: |ctx, count, raise, at| registers::set(Thread::of(ctx), count, raise, at),
    cluster_rank: |ctx| {
        let block = Thread::of(ctx).block();
        block.index % block.grid.launch.cluster
    },
    cluster_size: |ctx| Thread::of(ctx).block().grid.launch.cluster,
    sums: |ctx, sums, step, at| {
        let thread = Thread::of(ctx);
        let stepped = thread.products.borrow_mut().step(sums, step, at);
        if let Err(what) = stepped {
            thread.misuse(at, what);
        }
    },
    meet_warpgroup: |ctx, at| barrier::meet_warpgroup(Thread::of(ctx), at),
    cluster_sync: |ctx, relaxed, at| cluster::sync(Thread::of(ctx), relaxed, at),
    map_shared: |ctx, address, rank, at| cluster::map_shared(Thread::of(ctx), address, rank, at),
    wait_for_previous: |ctx, at| {
        let thread = Thread::of(ctx);
        if thread.gpus().skips_wait(at) {
            return;
        }
        let grid = &thread.block().grid;
        if grid.follows_running() {
            thread.suspend(Wait::Previous { at });
        }
        if let Some(previous) = &grid.previous_clock {
            let races = &thread.gpus().memory.races;
            races.learn_end(&mut thread.race.borrow_mut(), &races.end_of(previous));
        }
    },
    launch_next: |ctx| Thread::of(ctx).block().trigger_next(),
    fence,
    event,
    // A thread that has panicked does not wait in its destructors.
    skips_wait: |ctx, at| {
        let thread = Thread::of(ctx);
        thread.unwinding.get() || thread.gpus().skips_wait(at)
    },
    exit,
    print,
    clock,
};
