//! `multimem` on the host: a load, reduction or store applies to every copy of the multicast
//! address that the simulator lists.

mod common;

use std::fmt::Debug;

use common::{COPIES, Event, STRIDE, run};
use cuda_std::arch::Access;
use cuda_std::atomic::{Order, Scope};
use cuda_std::multimem::{self, LoadReduce, Red, Value};
use cuda_std::prelude::*;
use cuda_std::reduce::{And, Max, Min, Or, Sum, SumInHalf, Xor};

/// The copies of one value, each followed by padding.
#[repr(align(64))]
struct Copies([[u8; STRIDE]; COPIES]);

impl Copies {
    fn of<V: Value>(values: [V; COPIES]) -> Self {
        let mut copies = Self([[0xa5; STRIDE]; COPIES]);
        for (copy, value) in copies.0.iter_mut().zip(values) {
            // SAFETY: a copy has 64 bytes, aligned to 64, and a value at most 16.
            unsafe { copy.as_mut_ptr().cast::<V>().write(value) };
        }
        copies
    }

    fn address<V>(&mut self) -> *mut V {
        let address = self.0.as_mut_ptr().expose_provenance();
        std::ptr::with_exposed_provenance_mut(address)
    }

    fn read<V: Value>(&self) -> [V; COPIES] {
        // SAFETY: the copies have the bytes of these values, by the constructor.
        self.0.map(|copy| unsafe { copy.as_ptr().cast::<V>().read_unaligned() })
    }
}

/// Checks that `load_reduce` reduces the copies, and that `red` combines each copy with a value,
/// both as `ReduceOp` does.
fn reduces<V, Op>(op: Op, values: [V; COPIES], reduced: V)
where
    V: LoadReduce<Op> + Red<Op> + PartialEq + Debug,
    Op: ReduceOp<V::Element> + Debug,
{
    let mut copies = Copies::of(values);
    let address = copies.address::<V>();
    // SAFETY: the test's simulator maps the address to the copies.
    let (loaded, events) = run(|| unsafe { multimem::load_reduce(op, address) });
    assert_eq!(loaded, reduced, "{op:?}");
    assert_eq!(copies.read::<V>(), values, "a load does not change the copies");
    let reads = events.iter().filter(|event| {
        matches!(
            event,
            Event::Access { bytes, access: Access::Read, .. } if *bytes == size_of::<V>()
        )
    });
    assert_eq!((reads.count(), events.len()), (COPIES, COPIES), "each copy is an access");

    // All copies start as the first value; after a `red` of each other value, every copy holds
    // the load's result.
    let mut copies = Copies::of([values[0]; COPIES]);
    let address = copies.address::<V>();
    for value in &values[1..] {
        // SAFETY: the address is that of copies in this test's simulator, which outlive the call.
        run(|| unsafe { multimem::red(op, address, *value, Order::Relaxed, Scope::Sys) });
    }
    assert_eq!(copies.read::<V>(), [reduced; COPIES], "{op:?}");
}

fn reduces_all_lanes<T, Op>(op: Op, values: [T; COPIES], reduced: T)
where
    T: Accumulate + PartialEq + Debug,
    Vec16<T>: LoadReduce<Op> + Red<Op>,
    Op: ReduceOp<<Vec16<T> as Value>::Element> + Debug,
{
    reduces(op, values.map(Vec16::splat), Vec16::splat(reduced));
}

#[test]
fn integers_are_reduced_with_wrap_around() {
    macro_rules! check {
        ($($type:ident)*) => { $(
            let (a, b, c) = ($type::MAX, 5, 0b110);
            reduces(Sum, [a, b, c], a.wrapping_add(11));
            reduces(Min, [a, b, c], 5);
            reduces(Max, [a, b, c], a);
            reduces(And, [a, b, c], 0b100);
            reduces(Or, [b, c, 8], 0b1111);
            reduces(Xor, [b, c, 1], 0b10);
            reduces_all_lanes(Sum, [a, b, c], a.wrapping_add(11));
            reduces_all_lanes(Min, [c, a, b], 5);
            reduces_all_lanes(Max, [c, a, b], a);
            reduces_all_lanes(And, [a, b, c], 0b100);
            reduces_all_lanes(Or, [b, c, 8], 0b1111);
            reduces_all_lanes(Xor, [b, c, 1], 0b10);
        )* };
    }
    check!(i32 u32 i64 u64);
    reduces(Min, [-1i32, 0, 1], -1);
    reduces(Max, [-1i64, -2, -3], -1);
}

#[test]
fn floats_are_summed() {
    reduces(Sum, [1.5f32, 2.0, -0.25], 3.25);
    reduces(Sum, [1.5f64, 2.0, -0.25], 3.25);
    reduces(Sum, [[1.0f32, 10.0], [2.0, 20.0], [3.0, 30.0]], [6.0, 60.0]);
    reduces_all_lanes(Sum, [1.5f32, 2.0, -0.25], 3.25);
    reduces_all_lanes(Sum, [1.5f64, 2.0, -0.25], 3.25);
}

#[test]
fn half_types_are_reduced_in_vectors_of_two_four_and_eight() {
    macro_rules! check {
        ($($type:ident)*) => { $(
            let of = $type::from_f32;
            let [a, b, c] = [1.5, -2.0, 4.0].map(of);
            reduces(Sum, [[a, b], [b, c], [c, a]], [of(3.5); 2]);
            reduces(SumInHalf, [[a, b], [b, c], [c, a]], [of(3.5); 2]);
            reduces(Min, [[a; 4], [b; 4], [c; 4]], [b; 4]);
            reduces(Max, [[a; 4], [b; 4], [c; 4]], [c; 4]);
            reduces(Sum, [[a; 4], [b; 4], [c; 4]], [of(3.5); 4]);
            reduces_all_lanes(Sum, [a, b, c], of(3.5));
            reduces_all_lanes(Min, [a, b, c], b);
            reduces_all_lanes(Max, [a, b, c], c);
        )* };
    }
    check!(f16 bf16);
}

#[test]
fn a_load_sums_halves_in_f32_unless_told_otherwise() {
    // Two addends of half an ulp: each is lost in an f16 sum, both count in an f32 sum.
    let [one, tiny] = [1.0, 1.0 / 2048.0].map(f16::from_f32);
    let mut copies = Copies::of([one, tiny, tiny].map(Vec16::splat));
    let address = copies.address::<f16>();
    // SAFETY: the test's simulator maps the address to the copies.
    let load = |op| run(|| unsafe { multimem::load_reduce_vec(op, address) }).0;
    assert_eq!(load(Sum), Vec16::splat(f16::from_f32(1.0 + 1.0 / 1024.0)));
    // SAFETY: the address is that of copies in this test's simulator, which outlive the call.
    let in_half = run(|| unsafe { multimem::load_reduce_vec(SumInHalf, address) }).0;
    assert_eq!(in_half, Vec16::splat(one));
}

#[test]
fn a_store_reaches_every_copy_and_nothing_else() {
    let mut copies = Copies::of([[0u32; 1]; COPIES].map(|[zero]| zero));
    let address = copies.address::<u32>();
    // SAFETY: the test's simulator maps the address to the copies.
    let events = run(|| unsafe {
        multimem::store(address, 7);
        multimem::store_ordered(address, 8, Order::Release, Scope::Gpu);
    });
    assert_eq!(copies.read::<u32>(), [8; COPIES]);
    assert!(copies.0.iter().all(|copy| copy[4..] == [0xa5; STRIDE - 4]));
    let access = |event: &Event| match event {
        Event::Access { access, .. } => Some(*access),
        _ => None,
    };
    let accesses: Vec<_> = events.1.iter().filter_map(access).collect();
    assert_eq!(accesses[..COPIES], [Access::Write; COPIES]);
    assert_eq!(accesses[COPIES..], [Access::AtomicWrite(Order::Release, Scope::Gpu); COPIES]);
    // SAFETY: the address is that of copies in this test's simulator, which outlive the call.
    run(|| unsafe { multimem::store_vec(address.cast::<u8>(), Vec16::splat(3)) });
    assert_eq!(copies.read::<Vec16<u32>>(), [Vec16::splat(0x0303_0303); COPIES]);
}

#[test]
fn an_ordered_load_yields_to_other_threads() {
    let mut copies = Copies::of([1u32, 2, 3]);
    let address = copies.address::<u32>();
    let (sum, events) = run(|| {
        // SAFETY: the test's simulator maps the address to the copies.
        unsafe { multimem::load_reduce_ordered(Sum, address, Order::Acquire, Scope::Sys) }
    });
    assert_eq!((sum, events.first()), (6, Some(&Event::Spin)));
}

#[test]
#[should_panic(expected = "not a multiple of 4")]
fn two_halves_are_aligned_to_four_bytes() {
    let mut copies = Copies::of([[f16::ONE; 4]; COPIES]);
    let address = copies.address::<f16>().wrapping_add(1).cast::<[f16; 2]>();
    // SAFETY: rejected before any access.
    run(|| unsafe { multimem::load_reduce(Sum, address) });
}

#[test]
#[should_panic(expected = "relaxed or release")]
fn an_acquiring_update_is_refused() {
    let mut copies = Copies::of([1u32; COPIES]);
    let address = copies.address::<u32>();
    // SAFETY: rejected before any access.
    run(|| unsafe { multimem::red(Sum, address, 1, Order::Acquire, Scope::Sys) });
}
