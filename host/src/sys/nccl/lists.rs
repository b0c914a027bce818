//! Device communicator requirements with their linked lists, in the layout that NCCL reads.

use std::ffi::c_int;
use std::ptr::{NonNull, null_mut};

use devcomm_types::Team;
use devcomm_types::nccl::{MultimemHandle, ResourceHandle};

use devcomm_sys::nccl::{Requirements, ResourceRequirements, TeamRequirements};

/// The requirement of one node of the resource list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ResourceNode {
    /// Size and alignment of a buffer, in bytes.
    pub buffer: (usize, usize),
    pub signals: c_int,
    pub counters: c_int,
}

/// The requirement of one node of the team list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TeamNode {
    pub team: Team,
    pub multimem: bool,
}

/// NCCL's results for a node of the resource list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ResourceAnswer {
    pub buffer: ResourceHandle,
    pub first_signal: u32,
    pub first_counter: u32,
}

/// `ncclDevCommRequirements_t` and its two linked lists, with memory for the results of each node.
///
/// `ncclDevCommCreate` copies the requirements and the nodes, but keeps the addresses of the
/// results, and writes those when it completes: inside a group at `ncclGroupEnd`, for a
/// non-blocking communicator even later. Nodes and results do not move with this value. A caller
/// that passes [`raw`](Self::raw) to NCCL neither drops this nor reads a result before NCCL has
/// completed the call.
pub(crate) struct RequirementLists {
    raw: Requirements,
    resources: HeapSlice<(ResourceRequirements, ResourceAnswer)>,
    teams: HeapSlice<(TeamRequirements, MultimemHandle)>,
}

// SAFETY: the pointers lead only to memory that this value owns, and nothing here depends on the
// thread.
unsafe impl Send for RequirementLists {}
// SAFETY: NCCL writes the results before the call completes, and they are read only afterwards, by
// this type's contract.
unsafe impl Sync for RequirementLists {}

impl RequirementLists {
    /// Adds linked lists of the nodes, in order, to `raw`.
    pub(crate) fn new(
        mut raw: Requirements,
        resources: &[ResourceNode],
        teams: &[TeamNode],
    ) -> Self {
        let resources = HeapSlice::new(resources.iter().map(|node| {
            let requirement = ResourceRequirements {
                buffer_size: node.buffer.0,
                buffer_align: node.buffer.1,
                gin_signal_count: node.signals,
                gin_counter_count: node.counters,
                ..ResourceRequirements::NONE
            };
            (requirement, ResourceAnswer::default())
        }));
        let mut next = null_mut();
        for index in (0..resources.len()).rev() {
            // SAFETY: within the allocation, which only this value uses until it is passed to
            // NCCL.
            unsafe {
                let node = resources.at(index);
                (*node).0.next = next;
                (*node).0.out_buffer_handle = &raw mut (*node).1.buffer;
                (*node).0.out_gin_signal_start = &raw mut (*node).1.first_signal;
                (*node).0.out_gin_counter_start = &raw mut (*node).1.first_counter;
                next = &raw mut (*node).0;
            }
        }
        raw.resource_requirements_list = next;

        let teams = HeapSlice::new(teams.iter().map(|node| {
            let requirement = TeamRequirements {
                next: null_mut(),
                team: node.team,
                multimem: node.multimem,
                out_multimem_handle: null_mut(),
            };
            (requirement, MultimemHandle::NULL)
        }));
        let mut next = null_mut();
        for index in (0..teams.len()).rev() {
            // SAFETY: the index is below the length, and only this function uses the nodes yet.
            unsafe {
                let node = teams.at(index);
                (*node).0.next = next;
                (*node).0.out_multimem_handle = &raw mut (*node).1;
                next = &raw mut (*node).0;
            }
        }
        raw.team_requirements_list = next;
        Self { raw, resources, teams }
    }

    /// Returns the struct for NCCL. Its lists live as long as this value.
    pub(crate) fn raw(&self) -> &Requirements {
        &self.raw
    }

    /// Returns the results of a node of the resource list.
    pub(crate) fn resource(&self, index: usize) -> Option<ResourceAnswer> {
        // SAFETY: within the allocation; NCCL has written it, by this type's contract.
        (index < self.resources.len()).then(|| unsafe { (*self.resources.at(index)).1 })
    }

    /// Returns the result of a node of the team list; NULL where NCCL made no multicast mapping.
    pub(crate) fn team(&self, index: usize) -> Option<MultimemHandle> {
        // SAFETY: within the allocation; NCCL has written it, by this type's contract.
        (index < self.teams.len()).then(|| unsafe { (*self.teams.at(index)).1 })
    }
}

/// A slice on the heap that is accessed through raw pointers only: a `Box` would claim unique
/// access.
struct HeapSlice<T: Copy>(NonNull<[T]>);

impl<T: Copy> HeapSlice<T> {
    fn new(items: impl Iterator<Item = T>) -> Self {
        let slice = Box::into_raw(items.collect::<Box<[T]>>());
        // SAFETY: a box is never NULL.
        Self(unsafe { NonNull::new_unchecked(slice) })
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the address of an element.
    ///
    /// # Safety
    ///
    /// `index` is below `len`.
    unsafe fn at(&self, index: usize) -> *mut T {
        // SAFETY: the index is in bounds, by this function's contract.
        unsafe { self.0.as_ptr().cast::<T>().add(index) }
    }
}

impl<T: Copy> Drop for HeapSlice<T> {
    fn drop(&mut self) {
        // SAFETY: it came from a `Box`, and is freed once.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes results as NCCL does, through the addresses in copies of the nodes, with indices in
    /// list order.
    fn answer(raw: &Requirements) -> Vec<ResourceNode> {
        let mut seen = Vec::new();
        let (mut buffer, mut signal, mut counter) = (0, 100, 200);
        let mut node = raw.resource_requirements_list;
        while !node.is_null() {
            // SAFETY: a live node of a list that ends with NULL, with the addresses of live memory.
            unsafe {
                let copy = *node;
                *copy.out_buffer_handle = buffer;
                *copy.out_gin_signal_start = signal;
                *copy.out_gin_counter_start = counter;
                buffer += copy.buffer_size.div_ceil(128) as u32;
                signal += copy.gin_signal_count as u32;
                counter += copy.gin_counter_count as u32;
                seen.push(ResourceNode {
                    buffer: (copy.buffer_size, copy.buffer_align),
                    signals: copy.gin_signal_count,
                    counters: copy.gin_counter_count,
                });
                node = copy.next;
            }
        }
        let (mut address, mut node) = (4096, raw.team_requirements_list);
        while !node.is_null() {
            // SAFETY: a live node of a list that ends with NULL, and a live result.
            unsafe {
                if (*node).multimem {
                    (*(*node).out_multimem_handle).base = std::ptr::without_provenance_mut(address);
                }
                address += 4096;
                node = (*node).next;
            }
        }
        seen
    }

    #[test]
    fn answers_come_back_to_their_nodes_even_after_a_move_to_another_thread() {
        let nodes = [
            ResourceNode { buffer: (200, 4), ..Default::default() },
            ResourceNode { signals: 5, ..Default::default() },
            ResourceNode { counters: 7, ..Default::default() },
            ResourceNode { buffer: (1, 1024), signals: 1, counters: 1 },
        ];
        let team = Team { n_ranks: 2, rank: 0, stride: 1 };
        let teams = [TeamNode { team, multimem: false }, TeamNode { team, multimem: true }];
        let lists = Box::new(RequirementLists::new(Requirements::new(), &nodes, &teams));
        let raw = *lists.raw();
        let moved = *lists;
        let lists = std::thread::spawn(move || {
            assert_eq!(answer(moved.raw()), nodes);
            moved
        })
        .join()
        .unwrap();
        let answers: Vec<_> = (0..4).filter_map(|index| lists.resource(index)).collect();
        let expected = [(0, 100, 200), (2, 100, 200), (2, 105, 200), (2, 105, 207)].map(
            |(buffer, first_signal, first_counter)| ResourceAnswer {
                buffer,
                first_signal,
                first_counter,
            },
        );
        assert_eq!(answers, expected);
        assert_eq!(lists.team(0), Some(MultimemHandle::NULL));
        assert_eq!(lists.team(1).unwrap().base.addr(), 8192);
        assert_eq!((lists.resource(4), lists.team(2)), (None, None));
        assert_eq!(raw.resource_requirements_list, lists.raw().resource_requirements_list);
    }

    #[test]
    fn without_nodes_there_are_no_lists() {
        let lists = RequirementLists::new(Requirements::new(), &[], &[]);
        assert!(lists.raw().resource_requirements_list.is_null());
        assert!(lists.raw().team_requirements_list.is_null());
        assert_eq!((lists.resource(0), lists.team(0)), (None, None));
    }
}
