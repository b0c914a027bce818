//! Multicast addresses: the simulator lists an address's copies, and this module does the
//! arithmetic.

use std::panic::Location;

use half::{bf16, f16};

use super::memory::{misaligned, spin};
use super::{Access, Order, Scope, current};
use crate::multimem::raw::{Bytes, LoadReduce, Red, Strength};
use crate::multimem::{Value, operations, values};
use crate::reduce::{Accumulate, And, Max, Min, Or, ReduceOp, Sum, SumInHalf, Xor};
use crate::vector::Vec16;

/// Returns the copies of a multicast address, all accessed at once.
#[track_caller]
fn copies<V>(address: *const V, access: Access) -> impl Iterator<Item = *mut V> + Clone {
    let bytes = size_of::<V>();
    if !address.addr().is_multiple_of(bytes) {
        misaligned(address.addr(), bytes);
    }
    let (thread, context) = current();
    let at = Location::caller();
    let found = (context.ops.multimem)(thread, address.addr(), bytes, access, at);
    (0..found.n).map(move |i| found.first.wrapping_add(i * found.stride).cast())
}

/// Returns the element `i` of the value at `copy`.
///
/// # Safety
///
/// `copy` is valid for accesses of a `V`, which has more than `i` elements.
unsafe fn element<V: Value>(copy: *mut V, i: usize) -> *mut V::Element {
    // SAFETY: a value is an array of its elements; the rest is the caller's contract.
    unsafe { copy.cast::<V::Element>().add(i) }
}

/// Returns the number of elements of a value.
const fn elements<V: Value>() -> usize {
    size_of::<V>() / size_of::<V::Element>()
}

/// Implements [`LoadReduce::load_reduce`]. `f16` and `bf16` are reduced in `f32` and rounded once;
/// [`SumInHalf`] also rounds each step.
///
/// # Safety
///
/// The contract is that of [`LoadReduce::load_reduce`].
#[track_caller]
unsafe fn load_reduce<V: Value, Op: ReduceOp<V::Element>>(
    op: Op,
    address: *const V,
    strength: Strength,
) -> V {
    let access = strength.map_or(Access::Read, |(order, scope)| Access::AtomicRead(order, scope));
    if strength.is_some() {
        spin();
    }
    let copies = copies(address, access);
    let Some(first) = copies.clone().next() else {
        panic!("the multicast address {address:p} has no copies");
    };
    // SAFETY: the copies are valid by the caller's contract; `i` is below the number of elements.
    unsafe {
        let mut value = first.read();
        for i in 0..elements::<V>() {
            let inputs = copies.clone().map(|copy| op.input((*element(copy, i)).to_acc()));
            if let Some(acc) = inputs.reduce(|a, b| op.combine(a, b)) {
                *element(&raw mut value, i) = Accumulate::from_acc(op.result(acc));
            }
        }
        value
    }
}

/// Implements [`Red::red`].
///
/// # Safety
///
/// The contract is that of [`Red::red`].
#[track_caller]
unsafe fn red<V: Value, Op: ReduceOp<V::Element>>(
    op: Op,
    address: *mut V,
    mut value: V,
    order: Order,
    scope: Scope,
) {
    for copy in copies(address, Access::AtomicRmw(order, scope)) {
        for i in 0..elements::<V>() {
            // SAFETY: the caller passes a multicast address whose copies are valid for writes and
            // aligned.
            unsafe {
                let (to, with) = (element(copy, i), *element(&raw mut value, i));
                *to = Accumulate::from_acc(op.combine((*to).to_acc(), with.to_acc()));
            }
        }
    }
}

macro_rules! stores {
    ($($value:ty: $element:ident $kind:ident;)*) => { $(
        impl Bytes for $value {
            #[track_caller]
            unsafe fn store(address: *mut Self, value: Self, strength: Strength) {
                let access = strength
                    .map_or(Access::Write, |(order, scope)| Access::AtomicWrite(order, scope));
                for copy in copies(address, access) {
                    // SAFETY: the copies are valid by the caller's contract.
                    unsafe { copy.write(value) };
                }
            }
        }
    )* };
}
values!(stores);

macro_rules! impls {
    ($($op:ident $value:ty: $kind:ident $load:literal, $red:literal;)*) => { $(
        impl LoadReduce<$op> for $value {
            #[track_caller]
            unsafe fn load_reduce(op: $op, address: *const Self, strength: Strength) -> Self {
                // SAFETY: the caller passes a multicast address whose copies are valid for reads
                // and aligned.
                unsafe { load_reduce(op, address, strength) }
            }
        }

        impl Red<$op> for $value {
            #[track_caller]
            unsafe fn red(op: $op, address: *mut Self, value: Self, order: Order, scope: Scope) {
                // SAFETY: the caller passes a multicast address whose copies are valid for writes
                // and aligned.
                unsafe { red(op, address, value, order, scope) }
            }
        }
    )* };
}
operations!(impls);
