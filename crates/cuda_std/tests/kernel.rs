//! `#[kernel]` on the host: the item, its two traits, its instances.

mod common;

use common::run;
use cuda_std::prelude::*;
use cuda_std::println;
use devcomm_types::{HostKernel, Kernel};

/// Adds one to `count` elements.
#[kernel]
pub unsafe fn increment(x: *mut u32, mut count: usize) {
    while count > 0 {
        count -= 1;
        // SAFETY: the caller gives `count` elements.
        unsafe { mem::store(x.add(count), mem::load(x.add(count)) + 1) };
    }
}

#[kernel]
fn does_nothing() {}

#[kernel(arch = "sm_90a")]
pub(crate) fn prints(value: f32) {
    println!("{value}");
}

/// Sums `count` vectors into `out` through shared memory.
#[kernel(T = [f32, f16, half_alias])]
pub unsafe fn sum<T: Accumulate>(x: *const T, out: *mut T, count: usize) {
    let shared = shared_array![T; 8];
    // SAFETY: the caller gives `count` vectors, and room for one.
    unsafe {
        let mut acc = T::widen(mem::load_vec(x));
        for i in 1..count {
            T::add(&mut acc, mem::load_vec(x.add(i * Vec16::<T>::LANES)));
        }
        mem::store_vec(shared, T::narrow(acc));
        mem::store_vec(out, mem::load_vec(shared));
    }
}

#[expect(non_camel_case_types, reason = "the instance's suffix")]
type half_alias = bf16;

/// Two lists: every combination.
#[kernel(T = [u32, u64], N = [2, 3])]
unsafe fn fill<T: From<u16>, const N: usize>(out: *mut T) {
    let tile = [const { N as u16 }; N];
    for (i, value) in tile.into_iter().enumerate() {
        // SAFETY: the caller gives N elements.
        unsafe { *out.add(i) = T::from(value) };
    }
}

fn name<K: Kernel>(_: K) -> (&'static str, &'static str, usize) {
    (K::NAME, K::FILE, size_of::<K>())
}

/// # Safety
///
/// The kernel's contract.
unsafe fn call<K: HostKernel>(_: K, args: K::Args) -> Vec<common::Event> {
    // SAFETY: the caller's, and `run` makes a thread current.
    run(|| unsafe { K::call(args) }).1
}

#[test]
fn a_kernel_leaves_an_item_with_its_name_and_file() {
    assert_eq!(name(increment), ("increment", "kernel", 0));
    assert_eq!(name(does_nothing), ("does_nothing", "kernel", 0));
}

#[test]
fn an_instance_is_named_after_its_types_and_constants() {
    assert_eq!(name(sum::<f32>), ("sum_f32", "kernel", 0));
    assert_eq!(name(sum::<f16>).0, "sum_f16");
    assert_eq!(name(sum::<bf16>).0, "sum_half_alias");
    assert_eq!(name(fill::<u64, 3>), ("fill_u64_3", "kernel", 0));
}

#[test]
fn the_arguments_are_the_parameters() {
    fn takes<K: Kernel<Args = A>, A>(_: K) {}
    takes::<_, (*mut u32, usize)>(increment);
    takes::<_, ()>(does_nothing);
    takes::<_, (*const f16, *mut f16, usize)>(sum::<f16>);
}

#[test]
fn the_host_runs_the_body() {
    let mut x = [1, 2, 3];
    // SAFETY: three elements.
    let events = unsafe { call(increment, (x.as_mut_ptr(), 3)) };
    assert_eq!((x, events.len()), ([2, 3, 4], 6));
    // SAFETY: no contract.
    let events = unsafe { call(prints, (1.5,)) };
    assert_eq!(events, [common::Event::Print("1.5\n".into())]);
}

#[test]
fn the_body_of_an_instance_knows_its_types_and_constants() {
    let x = [Vec16::splat(bf16::from_f32(1.5)); 3];
    let mut out = Vec16::splat(bf16::ZERO);
    let args = (x.as_ptr().cast(), (&raw mut out).cast(), 3);
    // SAFETY: three vectors, room for one.
    unsafe { call(sum::<bf16>, args) };
    assert_eq!(out, Vec16::splat(bf16::from_f32(4.5)));
    let mut out = [0; 3];
    // SAFETY: room for two of three.
    unsafe { call(fill::<u32, 2>, (out.as_mut_ptr(),)) };
    assert_eq!(out, [2, 2, 0]);
}
