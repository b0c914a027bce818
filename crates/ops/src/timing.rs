//! The measurement that finds the fastest plan of an operation.

use devcomm_host::Graph;

use crate::prelude::*;

/// A plan is timed again if it takes at most this many times the least time of the first round.
const PROMISING: f32 = 1.2;
/// The expected plan is chosen if it takes at most this many times the least time: the rest is
/// noise.
const NOISE: f32 = 1.02;

/// Returns the plan, all of which can do the operation, whose launches take the least time, or the
/// expected plan if it takes at most 2 % more. `select` sets the plan of later launches. `launch`
/// enqueues the operation, perhaps in a capture; the stream has no other work. `slowest` turns the
/// times of this rank into those of the slowest one.
pub(crate) fn fastest<P: Copy + PartialEq>(
    stream: &Stream,
    plans: &[P],
    expected: P,
    select: impl Fn(P) -> Result<()>,
    launch: impl Fn() -> Result<()>,
    slowest: impl Fn(Vec<f32>) -> Result<Vec<f32>>,
) -> Result<P> {
    // The launches in the graph by which a plan is timed, and how often likely plans are timed
    // again. The times of simulated GPUs mean nothing.
    let (launches, rounds) = if stream.context().is_simulated() { (1, 1) } else { (8, 3) };
    let launch_all = || (0..launches).try_for_each(|_| launch());
    let (begin, end) = (stream.context().event()?, stream.context().event()?);
    let time = |plan, graph: Option<&Graph>| -> Result<f32> {
        if graph.is_none() {
            select(plan)?;
        }
        let run = || graph.map_or_else(launch_all, |graph| graph.launch(stream));
        // The first run waits for ranks that begin later, before the time begins.
        run()?;
        stream.record(&begin)?;
        run()?;
        stream.record(&end)?;
        stream.synchronize()?;
        end.elapsed_ms(&begin)
    };
    let mut graphs = Vec::new();
    let first = plans.iter().map(|&plan| {
        select(plan)?;
        // The first launch of a kernel may load its code, which a capture does not allow.
        launch()?;
        // The default stream cannot be captured.
        let graph = (!stream.is_default()).then(|| stream.capture(launch_all)).transpose()?;
        let time = time(plan, graph.as_ref());
        graphs.push(graph);
        time
    });
    let mut times = slowest(first.collect::<Result<_>>()?)?;
    let least = times.iter().copied().fold(f32::INFINITY, f32::min);
    let is_promising = |i: &usize| times[*i] <= PROMISING * least || plans[*i] == expected;
    let again: Vec<_> = (0..plans.len()).filter(is_promising).collect();
    for &i in (0..rounds).flat_map(|_| &again) {
        times[i] = times[i].min(time(plans[i], graphs[i].as_ref())?);
    }
    Ok(choose(plans, &slowest(times)?, expected))
}

fn choose<P: Copy + PartialEq>(plans: &[P], times: &[f32], expected: P) -> P {
    let timed = || plans.iter().zip(times);
    let least = times.iter().copied().fold(f32::INFINITY, f32::min);
    let kept = timed().find(|(plan, time)| **plan == expected && **time <= NOISE * least);
    let fastest = || timed().find(|(_, time)| **time <= least);
    kept.or_else(fastest).map_or(expected, |(plan, _)| *plan)
}

/// Returns the longest time of all ranks for each plan. *Collective*.
pub(crate) fn slowest(comm: &Communicator, mut times: Vec<f32>) -> Result<Vec<f32>> {
    for others in comm.host_all_gather(&times)? {
        times.iter_mut().zip(others).for_each(|(time, other)| *time = time.max(other));
    }
    Ok(times)
}

#[cfg(test)]
mod tests;
