//! Requests: operations that NCCL tests until they are complete.

use crate::abi::Opaque;
use crate::error::{Error, Result};

/// An accepted operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// Transfer `sequence` on the inbound queue of `rank`, in this process.
    Inbound { rank: usize, sequence: u64 },
    /// Operation `sequence` on the link to `rank`, in another process.
    Link { rank: usize, sequence: u64 },
}

/// The outstanding requests of a rank. Capacity is reserved when contexts are created.
#[derive(Default)]
pub(crate) struct Requests {
    entries: Vec<Entry>,
    free: Vec<u32>,
    /// Maximum outstanding requests of all contexts.
    bound: usize,
    /// Number of contexts so far.
    contexts: ContextId,
}

/// The number of a context of a rank.
pub(crate) type ContextId = u64;

struct Entry {
    /// Generation of the entry, to detect stale handles.
    generation: u32,
    request: Option<(ContextId, Request)>,
}

impl Entry {
    fn end(&mut self) {
        self.request = None;
        // 31 bits, so that the `+ 1` in a handle cannot overflow.
        self.generation = (self.generation + 1) & 0x7fff_ffff;
    }
}

impl Requests {
    /// Reserves capacity for `count` requests of a new context; reuses capacity that earlier
    /// contexts have released.
    pub(crate) fn reserve(&mut self, count: usize) -> ContextId {
        self.bound += count;
        let from = self.entries.len();
        let to = from.max(self.bound);
        self.entries.extend((from..to).map(|_| Entry { generation: 0, request: None }));
        self.free.reserve(to);
        self.free.extend((from..to).rev().map(|index| index as u32));
        self.contexts += 1;
        self.contexts
    }

    /// Drops the requests of a destroyed context, and releases its capacity of `count` requests.
    pub(crate) fn release(&mut self, context: ContextId, count: usize) {
        for (index, entry) in self.entries.iter_mut().enumerate() {
            if entry.request.is_some_and(|(owner, _)| owner == context) {
                entry.end();
                self.free.push(index as u32);
            }
        }
        self.bound -= count;
    }

    /// Returns the requests of a context that NCCL has not seen complete.
    pub(crate) fn outstanding_of(&self, context: ContextId) -> Vec<Request> {
        let all = self.entries.iter().filter_map(|entry| entry.request);
        all.filter(|(owner, _)| *owner == context).map(|(_, request)| request).collect()
    }

    /// Checks that there is capacity for one more request.
    pub(crate) fn require_room(&self) -> Result<()> {
        if self.free.is_empty() {
            return Err(Error::Internal(format!(
                "more requests are outstanding than the {} that all contexts together may have",
                self.entries.len()
            )));
        }
        Ok(())
    }

    /// Stores a request, for which there is capacity; returns its handle, which is not null.
    pub(crate) fn add(&mut self, context: ContextId, request: Request) -> Result<Opaque> {
        self.require_room()?;
        let index = self.free.pop().unwrap_or_default(); // there is one
        let entry = &mut self.entries[index as usize];
        entry.request = Some((context, request));
        Ok(((u64::from(entry.generation) << 32) + u64::from(index) + 1) as Opaque)
    }

    fn index(handle: Opaque) -> (u32, u32) {
        let value = (handle as u64).wrapping_sub(1);
        ((value >> 32) as u32, value as u32)
    }

    /// Returns the request of a handle.
    pub(crate) fn get(&self, handle: Opaque) -> Result<Request> {
        let (generation, index) = Self::index(handle);
        self.entries
            .get(index as usize)
            .filter(|entry| entry.generation == generation)
            .and_then(|entry| entry.request)
            .map(|(_, request)| request)
            .ok_or_else(|| Error::Argument(format!("{handle:?} is not an outstanding request")))
    }

    /// Removes a complete request, whose handle [`get`](Self::get) has accepted.
    pub(crate) fn remove(&mut self, handle: Opaque) {
        let (_, index) = Self::index(handle);
        if let Some(entry) = self.entries.get_mut(index as usize)
            && entry.request.is_some()
        {
            entry.end();
            self.free.push(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_of_a_completed_request_is_refused() {
        let mut requests = Requests::default();
        let request = Request::Inbound { rank: 0, sequence: 1 };
        assert!(requests.add(1, request).is_err());
        requests.reserve(1);
        let first = requests.add(1, request).unwrap();
        assert!(!first.is_null());
        assert!(requests.add(1, request).is_err());
        assert_eq!(requests.get(first).unwrap(), request);
        requests.remove(first);
        assert!(requests.get(first).is_err());
        requests.release(1, 1);
        requests.reserve(1);
        assert_eq!(requests.entries.len(), 1, "a new context reuses released capacity");
        let second = requests.add(1, request).unwrap();
        assert!(requests.get(first).is_err());
        assert_eq!(requests.get(second).unwrap(), request);
    }

    #[test]
    fn releasing_a_context_drops_its_requests_but_not_those_of_others() {
        let mut requests = Requests::default();
        let request = |sequence| Request::Inbound { rank: 0, sequence };
        requests.reserve(2);
        requests.reserve(1);
        let first = requests.add(1, request(1)).unwrap();
        requests.add(1, request(2)).unwrap();
        let other = requests.add(2, request(3)).unwrap();
        assert_eq!(requests.outstanding_of(1).len(), 2);
        requests.release(1, 2);
        assert_eq!(requests.outstanding_of(1), []);
        assert!(requests.get(first).is_err());
        assert_eq!(requests.get(other).unwrap(), request(3));
        requests.reserve(2);
        assert_eq!(requests.entries.len(), 3);
        for sequence in 4..6 {
            requests.add(3, request(sequence)).unwrap();
        }
        assert!(requests.require_room().is_err());
    }
}
