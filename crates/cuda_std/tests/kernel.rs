//! Tests of `#[kernel]` on the host: names, arguments, instances, structs as parameters, `requires`
//! conditions.

mod common;

use common::run;
use cuda_std::prelude::*;
use cuda_std::println;
use devcomm_types::{Dim3, HostKernel, Kernel};

/// Adds one to `count` elements.
///
/// # Safety
///
/// `x` has `count` elements.
#[kernel]
pub unsafe fn increment(x: *mut u32, mut count: usize) {
    while count > 0 {
        count -= 1;
        // SAFETY: `x` has `count` elements.
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
///
/// # Safety
///
/// `x` has `count` vectors, and `out` one.
#[kernel(T = [f32, f16, half_alias])]
pub unsafe fn sum<T: Accumulate>(x: *const T, out: *mut T, count: usize) {
    let shared = shared_array![T; 8];
    // SAFETY: `x` has `count` vectors, and `out` one.
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

/// Stores the number `N` to each of `N` elements. Every combination of two lists is an instance.
#[kernel(T = [u32, u64], N = [2, 3])]
unsafe fn fill<T: From<u16>, const N: usize>(out: *mut T) {
    let tile = [const { N as u16 }; N];
    for (i, value) in tile.into_iter().enumerate() {
        // SAFETY: `out` has N elements.
        unsafe { *out.add(i) = T::from(value) };
    }
}

/// Returns the names of a kernel, its file and its package.
fn name<K: Kernel>() -> (&'static str, &'static str, &'static str) {
    (K::NAME, K::FILE, K::PACKAGE)
}

/// Runs one thread of a kernel, and returns the recorded calls.
///
/// # Safety
///
/// The kernel's contract holds for `args`.
unsafe fn call<K: HostKernel>(args: K::Args) -> Vec<common::Event> {
    // SAFETY: the caller's contract; `run` sets a current thread.
    run(|| unsafe { K::call(args) }).1
}

#[test]
fn a_kernel_leaves_an_item_with_its_name_and_file() {
    assert_eq!(name::<increment>(), ("increment", "kernel", "devcomm-cuda-std"));
    assert_eq!(name::<does_nothing>(), ("does_nothing", "kernel", "devcomm-cuda-std"));
}

#[test]
fn an_instance_is_named_after_its_types_and_constants() {
    assert_eq!(name::<sum<f32>>(), ("sum_f32", "kernel", "devcomm-cuda-std"));
    assert_eq!(name::<sum<f16>>().0, "sum_f16");
    assert_eq!(name::<sum<bf16>>().0, "sum_half_alias");
    assert_eq!(name::<fill<u64, 3>>(), ("fill_u64_3", "kernel", "devcomm-cuda-std"));
}

#[test]
fn the_arguments_are_the_parameters() {
    fn takes<K: Kernel<Args = A>, A>() {}
    takes::<increment, (*mut u32, usize)>();
    takes::<does_nothing, ()>();
    takes::<sum<f16>, (*const f16, *mut f16, usize)>();
}

#[test]
fn the_host_runs_the_body() {
    let mut x = [1, 2, 3];
    // SAFETY: `x` has three elements.
    let events = unsafe { call::<increment>((x.as_mut_ptr(), 3)) };
    assert_eq!((x, events.len()), ([2, 3, 4], 6));
    // SAFETY: the kernel prints its argument and accesses no memory.
    let events = unsafe { call::<prints>((1.5,)) };
    assert_eq!(events, [common::Event::Print("1.5\n".into())]);
}

#[test]
fn the_body_of_an_instance_knows_its_types_and_constants() {
    let x = [Vec16::splat(bf16::from_f32(1.5)); 3];
    let mut out = Vec16::splat(bf16::ZERO);
    let args = (x.as_ptr().cast(), (&raw mut out).cast(), 3);
    // SAFETY: `x` has three vectors, and `out` is one.
    unsafe { call::<sum<bf16>>(args) };
    assert_eq!(out, Vec16::splat(bf16::from_f32(4.5)));
    let mut out = [0; 3];
    // SAFETY: `out` has three elements, two are written.
    unsafe { call::<fill<u32, 2>>((out.as_mut_ptr(),)) };
    assert_eq!(out, [2, 2, 0]);
}

/// A kernel's parameters in a struct.
#[repr(C)]
#[derive(Clone, Copy, KernelParam)]
struct Job<T> {
    out: *mut T,
    count: usize,
    value: f32,
    negative: bool,
}

/// Stores a value to each element.
#[kernel(
    T = [f32],
    requires(job.count <= 8, job.count.is_multiple_of(2), grid.count() * block.count() == 64)
)]
unsafe fn store_all<T: From<f32> + Copy>(job: Job<T>) {
    for i in 0..job.count {
        // SAFETY: `job.out` has `count` elements.
        unsafe { *job.out.add(i) = T::from(if job.negative { -job.value } else { job.value }) };
    }
}

fn job(out: &mut [f32]) -> impl devcomm_types::LaunchArgs<(Job<f32>,)> {
    let (count, out) = (out.len(), out.as_mut_ptr().expose_provenance() as u64);
    (JobArgs { out, count, value: 1.5, negative: true },)
}

#[test]
fn a_struct_is_a_parameter_with_named_fields() {
    use devcomm_types::{KernelArgs, LaunchArgs};
    assert_eq!(<(Job<f32>,)>::SIZES, [24]);
    let mut out = [0.0; 2];
    // SAFETY: `out` has two elements.
    unsafe {
        let args = <(Job<f32>,)>::from_abi(job(&mut out).into_abi());
        call::<store_all<f32>>(args);
    }
    assert_eq!(out, [-1.5; 2]);
}

#[test]
fn what_a_kernel_requires_is_checked_with_the_values_of_both_sides() {
    use devcomm_types::LaunchArgs;
    let unmet = |grid: u32, n: usize| {
        let (mut out, block) = (vec![0.0; n], Dim3::from((32, 2)));
        store_all::<f32>::check(grid.into(), block, &job(&mut out).into_abi())
            .map_err(|unmet| unmet.to_string())
    };
    assert_eq!(unmet(1, 8), Ok(()));
    assert_eq!(unmet(1, 10), Err("`job.count <= 8`, but these are 10 and 8".to_owned()));
    assert_eq!(unmet(1, 3), Err("`job.count.is_multiple_of(2)`".to_owned()));
    assert_eq!(
        unmet(2, 8),
        Err("`grid.count() * block.count() == 64`, but these are 128 and 64".to_owned())
    );
    assert_eq!(increment::check(9.into(), 9.into(), &(0, 7)), Ok(()));
}

/// Has conditions with arithmetic on integers and on floats.
#[kernel(requires(
    (first + count <= 8) && ((last - first) * 2 != 6),
    count % (4 - first) == 0,
    eps > 0.0,
    eps * scale <= 1.0
))]
fn compares(first: u32, last: u32, count: u32, eps: f32, scale: f32) {
    let _ = (first, last, count, eps, scale);
}

#[test]
fn a_condition_whose_arithmetic_overflows_is_not_met() {
    let unmet = |[first, last, count]: [u32; 3]| {
        compares::check(1.into(), 1.into(), &(first, last, count, 1.0, 1.0))
            .map_err(|unmet| unmet.to_string())
    };
    assert_eq!(unmet([2, 2, 4]), Ok(()));
    let message = "`first + count <= 8`, but these are 9 and 8".to_owned();
    assert_eq!(unmet([2, 2, 7]), Err(message));
    assert_eq!(unmet([2, 2, u32::MAX]), Err("`first + count <= 8`".to_owned()));
    let message = "`(last-first) * 2 != 6`, but these are 6 and 6".to_owned();
    assert_eq!(unmet([2, 5, 4]), Err(message));
    // A difference below zero, and a product above the type's values.
    for last in [1, u32::MAX] {
        assert_eq!(unmet([2, last, 4]), Err("`(last-first) * 2 != 6`".to_owned()));
    }
    assert_eq!(unmet([4, 4, 4]), Err("`count % (4-first) == 0`".to_owned()));
}

#[test]
fn a_condition_on_floats_is_shown_without_rounded_values() {
    let unmet = |eps: f32, scale: f32| {
        compares::check(1.into(), 1.into(), &(0, 0, 0, eps, scale))
            .map_err(|unmet| unmet.to_string())
    };
    assert_eq!(unmet(0.75, 1.25), Ok(()));
    assert_eq!(unmet(-0.5, 1.0), Err("`eps > 0.0`".to_owned()));
    assert_eq!(unmet(1.5, 1.0), Err("`eps * scale <= 1.0`".to_owned()));
}

/// Stores its numbers. Its name is a keyword, and its parameters' names are nearly alike, or those
/// of functions of the macro.
#[kernel(T = [u32])]
unsafe fn r#match<T: devcomm_types::KernelParam>(body: *mut T, args: T, x1: T, x_1: T, r#type: T) {
    for (i, number) in [args, x1, x_1, r#type].into_iter().enumerate() {
        // SAFETY: `body` has four elements.
        unsafe { *body.add(i) = number };
    }
}

/// Has a parameter of its own name, and one that could be the grid.
#[kernel]
unsafe fn doubles(doubles: *mut u32, grid: u32) {
    // SAFETY: `doubles` has one element.
    unsafe { *doubles = 2 * grid };
}

#[test]
fn parameters_may_have_any_names() {
    let mut out = [0; 4];
    // SAFETY: `out` has the elements.
    unsafe {
        call::<r#match<u32>>((out.as_mut_ptr(), 1, 2, 3, 4));
        assert_eq!(out, [1, 2, 3, 4]);
        call::<doubles>((out.as_mut_ptr(), 7));
    }
    assert_eq!((out[0], name::<r#match<u32>>().0), (14, "match_u32"));
}

/// Calls other kernels: a plain one and an instance of a generic one.
#[kernel]
unsafe fn increment_twice(x: *mut u32, count: usize) {
    // SAFETY: `x` has `count` elements, at least two.
    unsafe {
        increment(x, count);
        fill::<u32, 2>(x);
        increment(x, count);
    }
}

#[test]
fn a_kernel_can_call_another_as_a_function() {
    let mut x = [5, 6, 7];
    // SAFETY: `x` has three elements.
    unsafe { call::<increment_twice>((x.as_mut_ptr(), 3)) };
    assert_eq!(x, [3, 3, 9]);
}

#[test]
fn a_variable_may_have_the_name_of_a_kernel() {
    let increment = 1;
    let (does_nothing, sum) = (2, 3);
    assert_eq!(increment + does_nothing, sum);
}

#[test]
fn a_launch_of_a_safe_function_is_safe() {
    fn is_safe<K: Kernel>() -> bool {
        <K::Safety as devcomm_types::Safety>::SAFE
    }
    assert!(is_safe::<does_nothing>() && is_safe::<prints>());
    assert!(!is_safe::<increment>() && !is_safe::<sum<f32>>());
}
