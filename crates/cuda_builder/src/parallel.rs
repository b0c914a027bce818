//! Maps items on all processors.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Returns the result of `work` for each item, in the order of the items. A thread per processor
/// takes one item after the other.
pub(crate) fn map<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let run = || {
        let mut made = Vec::new();
        loop {
            // It only gives each index to one thread; a join orders what the threads make.
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else { return made };
            made.push((index, work(item)));
        }
    };
    let count = thread::available_parallelism().map_or(1, |n| n.get()).min(items.len());
    let mut made = thread::scope(|scope| {
        let threads: Vec<_> = (0..count).map(|_| scope.spawn(run)).collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        let made = joined.map(|made| made.unwrap_or_else(|panic| resume_unwind(panic)));
        made.flatten().collect::<Vec<_>>()
    });
    made.sort_by_key(|(index, _)| *index);
    made.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn each_item_is_worked_on_once_and_results_keep_their_order() {
        let items: Vec<usize> = (0..100).collect();
        let doubled: Vec<usize> = items.iter().map(|item| 2 * item).collect();
        assert_eq!(super::map(&items, |item| 2 * item), doubled);
        assert!(super::map(&[0; 0], |_| ()).is_empty());
    }
}
