//! Multicast addresses: what a `multimem` instruction reads and writes, one copy in every member of
//! a group of ranks.
//!
//! A group is a range of addresses that no machine maps, and every window has one place in all of
//! them, as with NCCL: an address is the group's base, the window's place and an offset. Nothing is
//! stored there; the addresses stand for the parts of the windows.

use std::cell::{Cell, Ref, RefCell};
use std::rc::Rc;

use cuda_std::arch::MulticastParts;
use litemap::LiteMap;

use crate::memory::last_until;

/// Where the groups start: bit 62 alone makes an address that no program can have.
const BASE: usize = 1 << 62;
/// Bits of an address within a group: as much as NCCL's places, counted in [`UNIT`], can name.
const GROUP_BITS: u32 = 44;
const MAX_GROUPS: usize = 1 << 17;
/// What places are counted in.
pub(crate) const UNIT: usize = 4096;

/// Ranks that are members: `n` of a communicator's from `first`, `stride` apart.
pub(crate) struct Group {
    /// The communicator: the GPU of each of its ranks.
    pub(crate) gpus: Rc<[u32]>,
    pub(crate) first: usize,
    pub(crate) n: usize,
    pub(crate) stride: usize,
}

impl Group {
    fn has(&self, gpu: usize) -> bool {
        let members = self.gpus[self.first..].iter().step_by(self.stride).take(self.n);
        members.into_iter().any(|member| *member as usize == gpu)
    }

    /// Whether it is this one of the communicator's teams.
    pub(crate) fn is(&self, first: usize, n: usize, stride: usize) -> bool {
        (self.first, self.n, self.stride) == (first, n, stride)
    }
}

/// A window's place in all groups.
struct Placed {
    /// The communicator whose ranks have parts of it.
    gpus: Rc<[u32]>,
    /// Length of each rank's part in bytes.
    lens: Rc<[usize]>,
    /// Rank 0's part.
    base: *mut u8,
    /// Distance between the parts in bytes.
    stride: usize,
}

/// The groups, and what has a place in them.
#[derive(Default)]
pub(crate) struct Multicast {
    groups: RefCell<Vec<Option<Group>>>,
    placed: RefCell<LiteMap<usize, Placed>>,
    /// The first place that is free, in units.
    next: Cell<usize>,
}

impl Multicast {
    /// A new group: its base address, if there is room.
    pub(crate) fn add_group(&self, group: Group) -> Option<usize> {
        let mut groups = self.groups.borrow_mut();
        let index = groups.iter().position(Option::is_none).unwrap_or(groups.len());
        if index == MAX_GROUPS {
            return None;
        }
        if index == groups.len() {
            groups.push(None);
        }
        groups[index] = Some(group);
        Some(BASE | index << GROUP_BITS)
    }

    /// The group with base `base` is no more.
    pub(crate) fn remove_group(&self, base: usize) {
        self.groups.borrow_mut()[(base ^ BASE) >> GROUP_BITS] = None;
    }

    /// The members of the group with base address `base`.
    pub(crate) fn group(&self, base: usize) -> Option<Ref<'_, Group>> {
        let index = (base ^ BASE) >> GROUP_BITS;
        Ref::filter_map(self.groups.borrow(), |groups| groups.get(index)?.as_ref()).ok()
    }

    /// Gives memory a place, in units: parts of these lengths in bytes of the communicator whose
    /// ranks are on `gpus`, rank 0's at `base` and `stride` bytes from one to the next.
    pub(crate) fn place(
        &self,
        gpus: &Rc<[u32]>,
        base: *mut u8,
        stride: usize,
        lens: &Rc<[usize]>,
    ) -> Option<u32> {
        let place = self.next.get();
        let bytes = lens.iter().copied().max()?;
        // A gap behind each, so that an access beyond the end meets nothing.
        let next = place.checked_add(bytes.div_ceil(UNIT) + 1)?;
        u32::try_from(next).ok()?;
        self.next.set(next);
        let placed = Placed { gpus: Rc::clone(gpus), lens: Rc::clone(lens), base, stride };
        self.placed.borrow_mut().insert(place * UNIT, placed);
        u32::try_from(place).ok()
    }

    /// The memory at `place` is no more.
    pub(crate) fn remove(&self, place: u32) {
        self.placed.borrow_mut().remove(&(place as usize * UNIT));
    }

    /// The copies of the bytes at `address`; or why there are none for `gpu`.
    pub(crate) fn parts(
        &self,
        gpu: usize,
        address: usize,
        bytes: usize,
    ) -> Result<MulticastParts, String> {
        if !is_multicast(address) {
            return Err(format!("{address:#x} is no multicast address"));
        }
        let Some(group) = self.group(address) else {
            return Err(format!("{address:#x} is in no multicast group that is alive"));
        };
        if !group.has(gpu) {
            return Err(format!("{address:#x} is in a multicast group without rank {gpu}"));
        }
        let within = address & ((1 << GROUP_BITS) - 1);
        let placed = self.placed.borrow();
        let found = last_until(&placed, within).map(|(start, placed)| (within - start, placed));
        match found {
            Some((_, memory)) if !Rc::ptr_eq(&memory.gpus, &group.gpus) => Err(format!(
                "{address:#x} names memory of one communicator in a multicast group of another"
            )),
            Some((offset, memory)) => {
                // Every member has the bytes.
                let members = memory.lens[group.first..].iter().step_by(group.stride);
                let len = members.take(group.n).copied().min().unwrap_or(0);
                if offset >= len || bytes > len - offset {
                    return Err(format!(
                        "{bytes} bytes at multicast offset {offset} of memory of {len} bytes"
                    ));
                }
                let first = memory.base.wrapping_add(group.first * memory.stride + offset);
                Ok(MulticastParts { first, stride: group.stride * memory.stride, n: group.n })
            }
            None => Err(format!("no window is at the multicast address {address:#x}")),
        }
    }
}

/// Whether an address is of this kind.
pub(crate) fn is_multicast(address: usize) -> bool {
    address >> 61 == BASE >> 61
}
