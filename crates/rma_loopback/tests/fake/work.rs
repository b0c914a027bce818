//! Workloads for ranks in threads and in processes.

use std::sync::atomic::{AtomicBool, Ordering};

use devcomm_rma_loopback::abi::{Opaque, PTR_CUDA, PTR_HOST, SIGNAL_ADD, SIGNAL_INC};

use super::driver::Random;
use super::{Memory, Rank};

/// Bytes of a message between two ranks, an odd number.
const MESSAGE: usize = 3001;
const ROUNDS: usize = 12;

fn byte(from: usize, to: usize, context: usize, round: usize, at: usize) -> u8 {
    (from * 31 + to * 17 + context * 7 + round * 3 + at) as u8
}

/// Sends messages from every rank to every rank, itself too, on every context: each message in up
/// to three puts of random sizes, the last with a signal. Meanwhile a thread in the role of a
/// kernel polls the signals and checks the data put before each signal.
pub fn traffic(rank: &Rank, contexts: usize, barrier: &dyn Fn()) {
    let traffic = Traffic::new(rank, contexts);
    barrier();
    let all_seen = AtomicBool::new(false);
    let (received, seen) = (&traffic.received, &all_seen);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            received.check_messages();
            seen.store(true, Ordering::Release);
        });
        traffic.send(rank);
        rank.drain();
        rank.serve(|| all_seen.load(Ordering::Acquire));
    });
    barrier();
    received.check_sums_and_values();
    assert!(!rank.has_error());
}

/// The numbers of a rank's messages.
#[derive(Clone, Copy)]
struct Layout {
    me: usize,
    ranks: usize,
    contexts: usize,
}

impl Layout {
    /// Returns the number of a message from, or to, a rank.
    fn message(self, rank: usize, context: usize, round: usize) -> usize {
        (rank * self.contexts + context) * ROUNDS + round
    }

    fn messages(self) -> usize {
        self.ranks * self.contexts * ROUNDS
    }
}

/// The memory that peers write to.
struct Received {
    layout: Layout,
    inbox: Memory,
    signals: Memory,
    sums: Memory,
    values: Memory,
}

impl Received {
    /// Polls the signals as a kernel does, until all messages have arrived, and checks their bytes.
    fn check_messages(&self) {
        let Layout { me, ranks, contexts } = self.layout;
        let mut seen = vec![0; ranks * contexts];
        while seen.iter().any(|seen| *seen < ROUNDS) {
            for (index, seen) in seen.iter_mut().enumerate() {
                let (context, from) = (index / ranks, index % ranks);
                let now = self.signals.load(index) as usize;
                assert!((*seen..=ROUNDS).contains(&now), "a signal has a wrong value: {now}");
                for round in *seen..now {
                    let first = self.layout.message(from, context, round) * MESSAGE;
                    let data = self.inbox.read(first, MESSAGE);
                    let bytes = data.iter().enumerate();
                    let wrong = bytes
                        .filter(|(at, seen)| **seen != byte(from, me, context, round, *at))
                        .count();
                    assert_eq!(wrong, 0, "a signal arrived before its data");
                }
                *seen = now;
            }
            std::thread::yield_now();
        }
    }

    /// Checks the sums that VA signals have made, and the inline values.
    fn check_sums_and_values(&self) {
        let Layout { me, ranks, contexts } = self.layout;
        for (index, sum) in (0..4).map(|index| (index, self.sums.load(index))) {
            let rounds = (index..ROUNDS).step_by(4).count();
            let expected: usize = (0..ranks).map(|from| rounds * contexts * (5 + from)).sum();
            assert_eq!(sum, expected as u64, "VA signals were lost");
        }
        for index in 0..self.layout.messages() {
            assert_eq!(self.values.load(index), (index << 8 | me) as u64);
        }
    }
}

/// A rank's memory, and the handles by which the plugin knows it.
struct Traffic {
    received: Received,
    inline: Memory,
    /// Kept, since the plugin reads it.
    _outbox: Memory,
    signals_at: Opaque,
    inline_at: Opaque,
    outbox_at: Opaque,
    inbox_at: Opaque,
    sums_at: Opaque,
    values_at: Opaque,
}

impl Traffic {
    fn new(rank: &Rank, contexts: usize) -> Self {
        let layout = Layout { me: rank.rank, ranks: rank.ranks, contexts };
        let (bytes, words) = (layout.messages() * MESSAGE, 8 * layout.messages());
        let outbox = Memory::filled(bytes, |at| {
            let (message, at) = (at / MESSAGE, at % MESSAGE);
            let (round, context) = (message % ROUNDS, message / ROUNDS % contexts);
            byte(layout.me, message / ROUNDS / contexts, context, round, at)
        });
        let (inbox, signals) = (Memory::new(bytes), Memory::new(8 * layout.ranks * contexts));
        let (sums, inline, values) = (Memory::new(4 * 8), Memory::new(words), Memory::new(words));
        Self {
            signals_at: rank.signals(&signals),
            inline_at: rank.host(&inline),
            outbox_at: rank.window(&outbox),
            inbox_at: rank.window(&inbox),
            sums_at: rank.window(&sums),
            values_at: rank.window(&values),
            received: Received { layout, inbox, signals, sums, values },
            inline,
            _outbox: outbox,
        }
    }

    /// Sends all messages, and after each one a VA signal and an inline value.
    fn send(&self, rank: &Rank) {
        let Layout { me, ranks, contexts } = self.received.layout;
        let mut random = Random(me as u64);
        for round in 0..ROUNDS {
            for step in 0..ranks * contexts {
                let (to, context) = ((step + me + round) % ranks, step / ranks);
                self.send_message(rank, [to, context, round], &mut random);
                // VA signals, from all ranks to the same words.
                rank.signal(context, to, (self.sums_at, 8 * (round % 4)), 5 + me as u64);
                // An inline value: one word of host memory.
                let from = (context * ROUNDS + round) * ranks + to;
                let into = self.received.layout.message(me, context, round);
                self.inline.word(from).store((into << 8 | to) as u64, Ordering::Relaxed);
                rank.put(context, (self.inline_at, 8 * from), 8, (self.values_at, 8 * into), to);
            }
        }
    }

    /// Sends a message in two or three parts, the last of which signals.
    fn send_message(&self, rank: &Rank, [to, context, round]: [usize; 3], random: &mut Random) {
        let Layout { me, ranks, .. } = self.received.layout;
        let from = self.received.layout.message(to, context, round) * MESSAGE;
        let into = self.received.layout.message(me, context, round) * MESSAGE;
        let first = 1 + random.below(MESSAGE as u64 - 2) as usize;
        let second = first + random.below((MESSAGE - first) as u64) as usize;
        let at = |offset| ((self.outbox_at, from + offset), (self.inbox_at, into + offset));
        let (source, target) = at(0);
        rank.put(context, source, first, target, to);
        if second > first {
            let (source, target) = at(first);
            rank.put(context, source, second - first, target, to);
        }
        let signal = (self.signals_at, 8 * (context * ranks + me));
        let (source, target) = at(second);
        // An increment adds 1, ignoring the value.
        let left = MESSAGE - second;
        rank.put_signal(context, source, left, target, to, signal, 99, SIGNAL_INC);
    }
}

/// Puts and gets between device and host memory, larger than all slots together and unaligned.
/// The gets are from a peer and from the rank itself.
pub fn ranges(rank: &Rank, barrier: &dyn Fn()) {
    const BYTES: usize = 100_003;
    let me = rank.rank;
    let kinds = [PTR_CUDA, PTR_HOST];
    let source = Memory::filled(BYTES, |at| (at * 7 + me + (at >> 8)) as u8);
    let signal = Memory::new(8);
    let sources = kinds.map(|kind| rank.register(&source, kind, 0));
    let signals = kinds.map(|kind| rank.register(&signal, kind, 0));
    let targets = [(); 4].map(|()| Memory::new(BYTES));
    let target_at =
        kinds.map(|kind| [0, 1, 2, 3].map(|index: usize| rank.register(&targets[index], kind, 0)));
    barrier();
    let (next, before) = ((me + 1) % rank.ranks, (me + rank.ranks - 1) % rank.ranks);
    let content = |rank: usize| move |at: usize| (at * 7 + rank + (at >> 8)) as u8;
    let mut signalled = 0;
    for (from, source) in sources.into_iter().enumerate() {
        for to in 0..2 {
            let target = 2 * from + to;
            let into = (target_at[to][target], 3);
            let signal_at = (signals[to], 0);
            let (bytes, from) = (BYTES - 5, (source, 1));
            rank.put_signal(0, from, bytes, into, next, signal_at, 10, SIGNAL_ADD);
            signalled += 10;
        }
    }
    rank.drain();
    rank.serve(|| signal.load(0) == signalled);
    barrier();
    for target in &targets {
        let data = target.read(0, BYTES);
        let expected: Vec<u8> = (0..BYTES - 5).map(|at| content(before)(at + 1)).collect();
        assert!(data[3..BYTES - 2] == expected[..], "a put's data is wrong");
        assert_eq!((&data[..3], &data[BYTES - 2..]), (&[0; 3][..], &[0; 2][..]));
    }
    barrier();
    for (from, source) in sources.into_iter().enumerate() {
        for to in 0..2 {
            let into = (target_at[to][2 * from + to], 0);
            rank.get(0, (source, 2), BYTES - 9, into, if to == 0 { next } else { me });
        }
    }
    rank.drain();
    rank.flush(0, signals[0]);
    for (index, target) in targets.iter().enumerate() {
        let from = if index % 2 == 0 { next } else { me };
        let expected: Vec<u8> = (0..BYTES - 9).map(|at| content(from)(at + 2)).collect();
        assert!(target.read(0, BYTES - 9) == expected, "a get's data is wrong");
    }
    // Until this barrier, others may get from this rank.
    barrier();
}

/// Gets from a peer, then puts to the rank itself, each checked as soon as it is complete.
pub fn one_by_one(rank: &Rank, barrier: &dyn Fn()) {
    const ROUNDS: usize = 30;
    let next = (rank.rank + 1) % rank.ranks;
    let content = |rank: usize, round: usize| vec![(rank * ROUNDS + round + 1) as u8; 40];
    let all: Vec<u8> = (0..ROUNDS).flat_map(|round| content(rank.rank, round)).collect();
    let source = Memory::filled(all.len(), |at| all[at]);
    let target = Memory::new(40);
    let (source_at, target_at) = (rank.window(&source), rank.window(&target));
    barrier();
    for round in 0..ROUNDS {
        rank.get(0, (source_at, 40 * round), 40, (target_at, 0), next);
        rank.drain();
        assert_eq!(target.read(0, 40), content(next, round), "a get was complete too early");
    }
    barrier();
    for round in (0..ROUNDS).rev() {
        rank.put(0, (source_at, 40 * round), 40, (target_at, 0), rank.rank);
        rank.drain();
        assert_eq!(target.read(0, 40), content(rank.rank, round), "a put was complete too early");
    }
    barrier();
}
