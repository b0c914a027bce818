//! Tests every element of messages of more than 2^31 elements and 4 GiB, by every plan.

use devcomm::{Collective, Collectives, Element, ReduceOp, Result, Window};
use devcomm_testing::machines::Gpus;
use half::bf16;

/// More elements than an `i32` counts: vectors, and three elements more.
const COUNT: usize = (1 << 31) + 8 * 5 + 3;
/// The number of elements after which a message repeats.
const PERIOD: usize = 61 << 10;

/// Returns the elements that a message repeats.
fn period<T>(element: impl Fn(usize) -> T) -> Vec<T> {
    (0..PERIOD).map(element).collect()
}

fn fill<T: Element>(window: &Window<T>, period: &[T]) -> Result<()> {
    let all: Vec<T> = period.iter().copied().cycle().take(window.len()).collect();
    window.copy_from_host(&all)
}

/// Requires that each part of a buffer repeats its period.
fn require<T: Element + PartialEq>(window: &Window<T>, parts: &[Vec<T>], what: &str) -> Result<()> {
    let mut got = vec![parts[0][0]; window.len()];
    window.copy_to_host(&mut got)?;
    for (part, (got, period)) in got.chunks(window.len() / parts.len()).zip(parts).enumerate() {
        for (at, got) in got.chunks(PERIOD).enumerate() {
            assert!(got == &period[..got.len()], "{what}: part {part}, from {} on", at * PERIOD);
        }
    }
    window.fill_bytes(0xff)
}

#[test]
fn messages_have_more_elements_and_bytes_than_32_bits_count() {
    let gpus = Gpus::new(2).only_real("memory for messages of 4 GiB");
    gpus.run("messages_have_more_elements_than_32_bits_count", |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let ranks = rank.n_ranks();
        let collectives = Collectives::new(comm)?;
        let sent = |rank: usize| move |i: usize| bf16::from_f32((i % 61 + rank) as f32);
        let sum = |i: usize| (0..ranks).map(|rank| sent(rank)(i).to_f32()).sum::<f32>();
        let (send, recv) = (comm.window::<bf16>(COUNT)?, comm.window::<bf16>(COUNT)?);
        fill(&send, &period(sent(rank.rank())))?;
        recv.fill_bytes(0xff)?;
        let reduce = |c: &Collectives| c.all_reduce(&send, &recv, ReduceOp::Sum, &stream);
        for plan in collectives.plans(&Collective::all_reduce(&send, &recv, ReduceOp::Sum))? {
            collectives.set_plan(Some(plan));
            reduce(&collectives)?;
            stream.synchronize()?;
            let sums = period(|i| bf16::from_f32(sum(i)));
            require(&recv, &[sums], &format!("all_reduce by {plan}"))?;
        }
        recv.close()?;
        send.close()?;

        // Each rank's part alone has more than 2^31 bytes, and the output more than 2^32.
        let part = (1 << 31) + 16 * 7;
        let sent = |rank: usize| move |i: usize| (i % 61 * 3 + rank) as u8;
        let (send, recv) = (comm.window::<u8>(part)?, comm.window::<u8>(ranks * part)?);
        fill(&send, &period(sent(rank.rank())))?;
        recv.fill_bytes(0xff)?;
        let gather = |c: &Collectives| c.all_gather(&send, &recv, &stream);
        for plan in collectives.plans(&Collective::all_gather(&send, &recv))? {
            collectives.set_plan(Some(plan));
            gather(&collectives)?;
            stream.synchronize()?;
            let parts: Vec<_> = (0..ranks).map(|rank| period(sent(rank))).collect();
            require(&recv, &parts, &format!("all_gather by {plan}"))?;
        }
        Ok(())
    });
}
