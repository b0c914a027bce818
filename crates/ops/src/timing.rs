//! Which plan of an operation is the fastest, by a measurement.

use devcomm_host::{Graph, Result, Stream};

/// Launches of a plan in a graph, which is timed.
const LAUNCHES: usize = 8;
/// Times that a graph is launched if its plan is not much slower than the fastest.
const ROUNDS: usize = 5;
/// How much longer a plan may take in its first launch to be launched again.
const PROMISING: f32 = 1.2;
/// How much longer the expected plan may take than the fastest to be kept: the noise of a few
/// launches.
const NOISE: f32 = 1.02;

/// An operation on a stream, which can be done by several plans.
pub(crate) trait Planned<P> {
    /// Lets launches be by this plan; whether it can do the operation.
    fn select(&self, plan: P) -> Result<bool>;

    /// Enqueues the operation, perhaps in a capture.
    fn launch(&self) -> Result<()>;

    /// The times of all ranks that take part, of each plan the longest. This rank has none if it
    /// had an error.
    fn agree(&self, times: Option<&[f32]>) -> Result<Vec<f32>>;
}

/// The plan whose launches take the least time, or the expected one if that takes at most 2 % more.
/// Selects plans, and leaves the last one selected. The stream has no other work.
pub(crate) fn fastest<P: Copy + PartialEq>(
    operation: &impl Planned<P>,
    stream: &Stream,
    plans: &[P],
    expected: P,
) -> Result<Option<P>> {
    let (begin, end) = (stream.context().event()?, stream.context().event()?);
    let time = |work: &Work, plan| -> Result<f32> {
        if let Work::Plain = work {
            operation.select(plan)?;
        }
        stream.record(&begin)?;
        match work {
            Work::None => return Ok(f32::INFINITY),
            Work::Graph(graph) => graph.launch(stream)?,
            Work::Plain => (0..LAUNCHES).try_for_each(|_| operation.launch())?,
        }
        stream.record(&end)?;
        stream.synchronize()?;
        end.elapsed_ms(&begin)
    };
    let first = plans.iter().map(|plan| {
        let work = Work::new(operation, stream, *plan)?;
        Ok((time(&work, *plan)?, work))
    });
    let first: Result<(Vec<_>, Vec<_>)> = first.collect();
    let agreed = operation.agree(first.as_ref().ok().map(|(times, _)| &times[..]));
    let ((_, works), mut times) = (first?, agreed?);
    let least = times.iter().copied().fold(f32::INFINITY, f32::min);
    let again: Vec<_> = (0..plans.len())
        .filter(|i| times[*i] <= PROMISING * least || plans[*i] == expected)
        .collect();
    let mut rounds = (0..ROUNDS).flat_map(|_| &again);
    let more: Result<()> = rounds.try_for_each(|&i| {
        times[i] = times[i].min(time(&works[i], plans[i])?);
        Ok(())
    });
    let agreed = operation.agree(more.is_ok().then_some(&times[..]));
    more?;
    Ok(choose(plans, &agreed?, expected))
}

/// How a plan is launched several times.
enum Work {
    /// It cannot do the operation.
    None,
    Graph(Graph),
    /// On a stream that cannot be captured.
    Plain,
}

impl Work {
    /// After a first launch.
    fn new<P>(operation: &impl Planned<P>, stream: &Stream, plan: P) -> Result<Self> {
        if !operation.select(plan)? {
            return Ok(Self::None);
        }
        operation.launch()?;
        if stream.as_raw().is_null() {
            return Ok(Self::Plain);
        }
        let launches = || (0..LAUNCHES).try_for_each(|_| operation.launch());
        Ok(Self::Graph(stream.capture(launches)?))
    }
}

fn choose<P: Copy + PartialEq>(plans: &[P], times: &[f32], expected: P) -> Option<P> {
    let timed = || plans.iter().zip(times);
    let (fastest, least) = timed().min_by(|a, b| a.1.total_cmp(b.1))?;
    let kept = timed().find(|(plan, time)| **plan == expected && **time <= NOISE * least);
    Some(*kept.map_or(fastest, |(plan, _)| plan))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_expected_plan_is_kept_unless_another_is_faster_by_more_than_noise() {
        let of = |times: [f32; 3], expected| choose(&['a', 'b', 'c'], &times, expected);
        assert_eq!(of([3.0, 1.0, 2.0], 'a'), Some('b'));
        assert_eq!(of([1.01, 1.0, 2.0], 'a'), Some('a'));
        assert_eq!(of([1.01, 1.0, 2.0], 'c'), Some('b'));
        assert_eq!(of([f32::INFINITY, 5.0, f32::INFINITY], 'x'), Some('b'));
        assert_eq!(choose(&[], &[], 'a'), None);
    }
}
