//! Multicast addresses: a `multimem` instruction on such an address accesses the memory of every
//! rank of a multicast group.
//!
//! A group is an address range that is never mapped. A window has the same offset in all groups, as
//! with NCCL: an address is the sum of the group's base, the window's offset in the group, and an
//! offset in the window. It refers to the bytes at this offset on every rank of the group.

use std::cell::{Cell, Ref, RefCell};
use std::rc::Rc;

use cuda_std::arch::MulticastParts;
use litemap::LiteMap;

use crate::base::layout::MULTICAST_UNIT;
use crate::base::ranges::last_until;

/// The base of the groups: bit 62 makes an address non-canonical.
const BASE: usize = 1 << 62;
/// The bits of an address within a group: the range of NCCL's 32-bit offsets in
/// [`MULTICAST_UNIT`]s.
const GROUP_BITS: u32 = 44;
/// The number of groups that fit below bit 61 of an address.
const MAX_GROUPS: usize = 1 << 17;

/// A multicast group: `n` ranks of a communicator from `first`, with stride `stride`.
pub(crate) struct MulticastGroup {
    /// The GPU of each rank of the communicator.
    pub(crate) gpus: Rc<[u32]>,
    pub(crate) first: usize,
    pub(crate) n: usize,
    pub(crate) stride: usize,
}

impl MulticastGroup {
    fn has(&self, gpu: usize) -> bool {
        let members = self.gpus[self.first..].iter().step_by(self.stride).take(self.n);
        members.into_iter().any(|member| *member as usize == gpu)
    }

    /// Returns whether the group is this team of the communicator.
    pub(crate) fn is(&self, first: usize, n: usize, stride: usize) -> bool {
        (self.first, self.n, self.stride) == (first, n, stride)
    }
}

/// A window that has an offset in all groups.
struct BoundWindow {
    /// The GPU of each rank of the window's communicator.
    gpus: Rc<[u32]>,
    /// Length of each rank's part in bytes.
    lens: Rc<[usize]>,
    /// Address of rank 0's part.
    base: *mut u8,
    /// Distance between consecutive ranks' parts in bytes.
    stride: usize,
}

/// The multicast groups, and the windows in them.
#[derive(Default)]
pub(crate) struct Multicast {
    groups: RefCell<Vec<Option<MulticastGroup>>>,
    bound: RefCell<LiteMap<usize, BoundWindow>>,
    /// The first free offset, in [`MULTICAST_UNIT`]s.
    next: Cell<usize>,
}

impl Multicast {
    /// Adds a group; returns its base address, or `None` at the maximum number of groups.
    pub(crate) fn add_group(&self, group: MulticastGroup) -> Option<usize> {
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

    /// Removes the group with base `base`.
    pub(crate) fn remove_group(&self, base: usize) {
        self.groups.borrow_mut()[(base ^ BASE) >> GROUP_BITS] = None;
    }

    /// Returns the group with base address `base`.
    pub(crate) fn group(&self, base: usize) -> Option<Ref<'_, MulticastGroup>> {
        let index = (base ^ BASE) >> GROUP_BITS;
        Ref::filter_map(self.groups.borrow(), |groups| groups.get(index)?.as_ref()).ok()
    }

    /// Binds a window at a new offset, which is returned in [`MULTICAST_UNIT`]s. Its parts have
    /// `lens` bytes; rank 0's is at `base`, and they are `stride` bytes apart.
    pub(crate) fn bind(
        &self,
        gpus: &Rc<[u32]>,
        base: *mut u8,
        stride: usize,
        lens: &Rc<[usize]>,
    ) -> Option<u32> {
        let unit = self.next.get();
        let bytes = lens.iter().copied().max()?;
        // One unit stays unused after each window, to detect an access beyond its end.
        let next = unit.checked_add(bytes.div_ceil(MULTICAST_UNIT) + 1)?;
        u32::try_from(next).ok()?;
        self.next.set(next);
        let bound = BoundWindow { gpus: Rc::clone(gpus), lens: Rc::clone(lens), base, stride };
        self.bound.borrow_mut().insert(unit * MULTICAST_UNIT, bound);
        u32::try_from(unit).ok()
    }

    /// Unbinds the window at `unit`.
    pub(crate) fn remove(&self, unit: u32) {
        self.bound.borrow_mut().remove(&(unit as usize * MULTICAST_UNIT));
    }

    /// Returns the copies of the bytes at `address`, or the reason why `gpu` cannot access them.
    pub(crate) fn parts(
        &self,
        gpu: usize,
        address: usize,
        bytes: usize,
    ) -> Result<MulticastParts, String> {
        if !is_multicast(address) {
            return Err(format!("{address:#x} is not a multicast address"));
        }
        let Some(group) = self.group(address) else {
            return Err(format!("{address:#x} is not in a live multicast group"));
        };
        if !group.has(gpu) {
            return Err(format!("{address:#x} is in a multicast group without rank {gpu}"));
        }
        let within = address & ((1 << GROUP_BITS) - 1);
        let bound = self.bound.borrow();
        let found = last_until(&bound, within).map(|(start, bound)| (within - start, bound));
        match found {
            Some((_, window)) if !Rc::ptr_eq(&window.gpus, &group.gpus) => Err(format!(
                "{address:#x} is a window of one communicator in a multicast group of another"
            )),
            Some((offset, window)) => {
                // The bytes must exist on every member.
                let members = window.lens[group.first..].iter().step_by(group.stride);
                let len = members.take(group.n).copied().min().unwrap_or(0);
                if offset >= len || bytes > len - offset {
                    return Err(format!(
                        "{bytes} bytes at multicast offset {offset} of memory of {len} bytes"
                    ));
                }
                let first = window.base.wrapping_add(group.first * window.stride + offset);
                Ok(MulticastParts { first, stride: group.stride * window.stride, n: group.n })
            }
            None => Err(format!("no window is at the multicast address {address:#x}")),
        }
    }
}

/// Returns whether an address is a multicast address.
pub(crate) fn is_multicast(address: usize) -> bool {
    address >> 61 == BASE >> 61
}
