//! Which plan of an operation is the fastest, by a measurement.

use devcomm_host::{Communicator, Graph, Result, Stream};

use crate::check::refuse;

/// Launches of a plan in a graph, which is timed.
const LAUNCHES: usize = 8;
/// Times that a graph is launched if its plan is not much slower than the fastest.
const ROUNDS: usize = 5;
/// How much longer a plan may take in its first launch to be launched again.
const PROMISING: f32 = 1.2;
/// How much longer the expected plan may take than the fastest to be kept: the noise of a few
/// launches.
const NOISE: f32 = 1.02;

/// The plan whose launches take the least time, or the expected one if that takes at most 2 % more.
/// The stream has no other work.
///
/// `select` lets launches be by a plan, and says whether it can do the operation: it is one of the
/// plans that are timed if it can in all ranks. `launch` enqueues the operation, perhaps in a
/// capture. `agree` makes the times of all ranks of those of this one, which has none if it had an
/// error.
pub(crate) fn fastest<P: Copy + PartialEq>(
    stream: &Stream,
    plans: &[P],
    expected: P,
    select: impl Fn(P) -> Result<bool>,
    launch: impl Fn() -> Result<()>,
    agree: impl Fn(Option<&[f32]>) -> Result<Vec<f32>>,
) -> Result<P> {
    let together = |own: Result<Vec<f32>>| {
        let agreed = agree(own.as_deref().ok());
        own.and(agreed)
    };
    let possible = |plan: &P| Ok(if select(*plan)? { 0.0 } else { f32::INFINITY });
    let possible = together(plans.iter().map(possible).collect())?;
    let plans = plans.iter().zip(possible).filter(|(_, time)| time.is_finite());
    let plans: Vec<_> = plans.map(|(plan, _)| *plan).collect();
    if plans.is_empty() {
        return Ok(expected);
    }
    let several = || (0..LAUNCHES).try_for_each(|_| launch());
    let (begin, end) = (stream.context().event()?, stream.context().event()?);
    let time = |plan, graph: Option<&Graph>| -> Result<f32> {
        if graph.is_none() {
            select(plan)?;
        }
        stream.record(&begin)?;
        graph.map_or_else(several, |graph| graph.launch(stream))?;
        stream.record(&end)?;
        stream.synchronize()?;
        end.elapsed_ms(&begin)
    };
    let mut graphs = Vec::new();
    let first = plans.iter().map(|&plan| {
        select(plan)?;
        launch()?;
        // The default stream cannot be captured.
        let graph = (!stream.as_raw().is_null()).then(|| stream.capture(several)).transpose()?;
        let time = time(plan, graph.as_ref());
        graphs.push(graph);
        time
    });
    let mut times = together(first.collect())?;
    let least = times.iter().copied().fold(f32::INFINITY, f32::min);
    let is_promising = |i: &usize| times[*i] <= PROMISING * least || plans[*i] == expected;
    let again: Vec<_> = (0..plans.len()).filter(is_promising).collect();
    let mut rounds = (0..ROUNDS).flat_map(|_| &again);
    let more: Result<()> = rounds.try_for_each(|&i| {
        times[i] = times[i].min(time(plans[i], graphs[i].as_ref())?);
        Ok(())
    });
    Ok(choose(&plans, &together(more.map(|()| times))?, expected))
}

/// Of each plan the longest time of all ranks. *Collective*.
pub(crate) fn slowest(comm: &Communicator) -> impl Fn(Option<&[f32]>) -> Result<Vec<f32>> {
    |times| {
        // A rank with an error sends an empty list, so that the others do not wait for it.
        let all = comm.host_all_gather(times.unwrap_or_default())?;
        if let Some(rank) = all.iter().position(Vec::is_empty) {
            return refuse(format!("rank {rank} cannot take part: its own error says why"));
        }
        let plans = all.iter().map(Vec::len).min().unwrap_or(0);
        let slowest = |i: usize| all.iter().map(|times| times[i]).fold(0.0, f32::max);
        Ok((0..plans).map(slowest).collect())
    }
}

fn choose<P: Copy + PartialEq>(plans: &[P], times: &[f32], expected: P) -> P {
    let timed = || plans.iter().zip(times);
    let least = times.iter().copied().fold(f32::INFINITY, f32::min);
    let kept = timed().find(|(plan, time)| **plan == expected && **time <= NOISE * least);
    let fastest = || timed().find(|(_, time)| **time <= least);
    kept.or_else(fastest).map_or(expected, |(plan, _)| *plan)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_expected_plan_is_kept_unless_another_is_faster_by_more_than_noise() {
        let of = |times: [f32; 3], expected| choose(&['a', 'b', 'c'], &times, expected);
        assert_eq!(of([3.0, 1.0, 2.0], 'a'), 'b');
        assert_eq!(of([1.01, 1.0, 2.0], 'a'), 'a');
        assert_eq!(of([1.01, 1.0, 2.0], 'c'), 'b');
        assert_eq!(of([f32::INFINITY, 5.0, f32::INFINITY], 'x'), 'b');
        assert_eq!(choose(&[], &[], 'a'), 'a');
    }
}
