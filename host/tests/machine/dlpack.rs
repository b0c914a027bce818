//! Tests of tensors that other libraries hand over, and are handed, by DLPack. The library here has
//! memory of a simulated GPU, and counts how often its deleters are called.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use devcomm_host::{
    Buffer, Context, DataType, DeviceSlice, DlpackTensor, Dynamic, Error, ReduceOp, Result,
};

use crate::support::{contents, filled, ranks};

/// `DLTensor` of dlpack.h.
#[repr(C)]
#[derive(Clone, Copy)]
struct DlTensor {
    data: u64,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLManagedTensor` of dlpack.h.
#[repr(C)]
struct DlManagedTensor {
    dl_tensor: DlTensor,
    manager_ctx: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManagedTensor)>,
}

/// `DLManagedTensorVersioned` of dlpack.h.
#[repr(C)]
struct DlManagedTensorVersioned {
    version: [u32; 2],
    manager_ctx: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManagedTensorVersioned)>,
    flags: u64,
    dl_tensor: DlTensor,
}

/// How often the deleter of a tensor was called.
type Deleted = Arc<AtomicUsize>;

fn count(deleted: *mut c_void) {
    // SAFETY: `deleted` is from `Arc::into_raw`, and no call gives that reference back.
    let deleted = unsafe { Arc::from_raw(deleted.cast::<AtomicUsize>()) };
    deleted.fetch_add(1, Ordering::Relaxed);
    // The reference stays, as the tensor does, so that a second call is counted and no error.
    std::mem::forget(deleted);
}

unsafe extern "C" fn delete(tensor: *mut DlManagedTensor) {
    // SAFETY: the tensor is live.
    count(unsafe { (*tensor).manager_ctx });
}

unsafe extern "C" fn delete_versioned(tensor: *mut DlManagedTensorVersioned) {
    // SAFETY: the tensor is live.
    count(unsafe { (*tensor).manager_ctx });
}

/// Returns a matrix of 2 x 3 f32 at `data` on GPU `device_id`.
fn matrix(data: u64, device_id: usize) -> DlTensor {
    const SHAPE: &[i64] = &[2, 3];
    DlTensor {
        data,
        device_type: 2, // kDLCUDA
        device_id: device_id as i32,
        ndim: 2,
        code: 2, // kDLFloat
        bits: 32,
        lanes: 1,
        shape: SHAPE.as_ptr(),
        strides: std::ptr::null(),
        byte_offset: 0,
    }
}

/// Lets the library export a tensor.
fn exported(dl_tensor: DlTensor) -> (DlpackTensor, Deleted) {
    let deleted = Deleted::default();
    let manager_ctx = Arc::into_raw(Arc::clone(&deleted)).cast_mut().cast();
    let managed = DlManagedTensor { dl_tensor, manager_ctx, deleter: Some(delete) };
    let managed = Box::into_raw(Box::new(managed));
    // SAFETY: a tensor of this library, which lives forever, in memory of the simulated machine.
    (unsafe { DlpackTensor::from_raw(managed.cast()) }.unwrap(), deleted)
}

fn exported_versioned(dl_tensor: DlTensor, major: u32, flags: u64) -> (DlpackTensor, Deleted) {
    let deleted = Deleted::default();
    let manager_ctx = Arc::into_raw(Arc::clone(&deleted)).cast_mut().cast();
    let (version, deleter) = ([major, 1], Some(delete_versioned as unsafe extern "C" fn(_)));
    let managed = DlManagedTensorVersioned { version, manager_ctx, deleter, flags, dl_tensor };
    let managed = Box::into_raw(Box::new(managed));
    // SAFETY: the tensor is one that was exported, and nothing else takes it.
    (unsafe { DlpackTensor::from_raw_versioned(managed.cast()) }.unwrap(), deleted)
}

fn times(deleted: &Deleted) -> usize {
    deleted.load(Ordering::Relaxed)
}

#[test]
fn a_tensor_is_given_back_once_when_the_gpu_no_longer_uses_it() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let memory = filled(comm, &[1.0_f32; 8])?;
        for versioned in [false, true] {
            let tensor =
                DlTensor { byte_offset: 8, ..matrix(memory.device_address(), rank.device()) };
            let (tensor, deleted) = match versioned {
                false => exported(tensor),
                true => exported_versioned(tensor, 1, 0),
            };
            let slice = DeviceSlice::<f32>::from_dlpack(rank.context(), tensor)?;
            assert_eq!((slice.len(), slice.device_address()), (6, memory.device_address() + 8));
            let part = slice.slice(2..)?;
            drop(slice);
            comm.all_reduce(&part, &part, ReduceOp::Sum, &stream)?;
            assert_eq!(times(&deleted), 0);
            drop(part);
            assert!(stream.is_idle()?);
            assert_eq!(times(&deleted), 1);
        }
        assert_eq!(contents(&memory), [1.0, 1.0, 1.0, 1.0, 4.0, 4.0, 4.0, 4.0]);
        Ok(())
    });
}

#[test]
fn a_tensor_that_is_refused_is_given_back_at_once_with_the_reason() {
    ranks(1, |rank| {
        let memory = filled(rank.communicator()?, &[1.0_f32; 8])?;
        let good = matrix(memory.device_address(), rank.device());
        let shapes: [&'static [i64]; 4] = [&[-1, 3], &[i64::MAX, 3], &[1, 3], &[0, 3]];
        let strides: [&'static [i64]; 3] = [&[1, 2], &[4, 1], &[99, 1]];
        let refused = |(tensor, deleted): (DlpackTensor, Deleted), words: &str| {
            let result = DeviceSlice::<f32>::from_dlpack(rank.context(), tensor);
            let Err(Error::InvalidInput { what, .. }) = result else {
                panic!("{words}: {result:?}")
            };
            assert!(what.contains(words), "{what:?} does not say {words:?}");
            assert_eq!(times(&deleted), 1, "{words}");
        };
        for (tensor, words) in [
            (DlTensor { device_type: 1, device_id: 0, ..good }, "a device of kind 1"),
            (DlTensor { device_id: 3, ..good }, "of GPU 3, not GPU 0"),
            (DlTensor { device_id: -1, ..good }, "of GPU -1, not GPU 0"),
            (DlTensor { bits: 64, ..good }, "of Float64, not Float32"),
            (DlTensor { code: 6, bits: 8, ..good }, "code 6, 8 bits"),
            (DlTensor { lanes: 4, ..good }, "4 lanes"),
            (DlTensor { strides: strides[0].as_ptr(), ..good }, "strides [1, 2]"),
            (DlTensor { strides: strides[1].as_ptr(), ..good }, "strides [4, 1]"),
            (DlTensor { shape: shapes[0].as_ptr(), ..good }, "shape [-1, 3]"),
            (DlTensor { shape: shapes[1].as_ptr(), ..good }, "the shape ["),
            (DlTensor { shape: std::ptr::null(), ..good }, "without a shape"),
            (DlTensor { ndim: -1, ..good }, "-1 dimensions"),
            (DlTensor { byte_offset: 2, ..good }, "Float32 at 0x"),
            (DlTensor { data: 0, ..good }, "Float32 at 0x0"),
            (DlTensor { data: u64::MAX, byte_offset: 4, ..good }, "beyond all addresses"),
        ] {
            refused(exported(tensor), words);
            refused(exported_versioned(tensor, 1, 0), words);
        }
        refused(exported_versioned(good, 2, 0), "DLPack 2.1; this crate takes 1.x");
        // Flag 1 is `DLPACK_FLAG_BITMASK_READ_ONLY`.
        refused(exported_versioned(good, 1, 1), "may not be written to");
        // SAFETY: NULL is refused.
        let null = [unsafe { DlpackTensor::from_raw(null_mut()) }, unsafe {
            DlpackTensor::from_raw_versioned(null_mut())
        }];
        assert!(null.iter().all(|null| matches!(null, Err(Error::InvalidInput { .. }))));

        // These are no gaps: a stride that nothing uses, a tensor without elements or dimensions.
        let lengths = [
            (DlTensor { shape: shapes[2].as_ptr(), strides: strides[2].as_ptr(), ..good }, 3),
            (DlTensor { shape: shapes[3].as_ptr(), strides: strides[0].as_ptr(), ..good }, 0),
            (DlTensor { ndim: 0, shape: std::ptr::null(), ..good }, 1),
        ];
        for (tensor, len) in lengths {
            let slice = DeviceSlice::<f32>::from_dlpack(rank.context(), exported(tensor).0)?;
            assert_eq!(slice.len(), len);
        }
        Ok(())
    });
}

#[test]
fn elements_of_every_type_go_out_and_come_back() {
    // With the code and the bits of `DLDataType`.
    const TYPES: [(DataType, u8, u8); 12] = [
        (DataType::Int8, 0, 8),
        (DataType::Uint8, 1, 8),
        (DataType::Int32, 0, 32),
        (DataType::Uint32, 1, 32),
        (DataType::Int64, 0, 64),
        (DataType::Uint64, 1, 64),
        (DataType::Float16, 2, 16),
        (DataType::Float32, 2, 32),
        (DataType::Float64, 2, 64),
        (DataType::Bfloat16, 4, 16),
        (DataType::Float8e4m3, 10, 8),
        (DataType::Float8e5m2, 12, 8),
    ];
    ranks(1, |rank| {
        let memory = filled(rank.communicator()?, &[1.0_f32; 8])?;
        let (context, address) = (rank.context(), memory.device_address());
        for (data_type, code, bits) in TYPES {
            // SAFETY: the memory outlives the slice, and nothing runs on it.
            let slice =
                unsafe { DeviceSlice::from_raw_parts_dynamic(context, address, 3, data_type) };
            let tensor = slice.to_dlpack();
            assert_eq!(tensor.capsule_name(), c"dltensor");
            let raw = tensor.into_raw();
            // SAFETY: a tensor that was just made.
            let found = unsafe { &*raw.cast::<DlManagedTensor>() };
            check(&found.dl_tensor, address, rank.device(), (code, bits));
            // SAFETY: as above; it is not used otherwise.
            same(context, unsafe { DlpackTensor::from_raw(raw) }?, &slice)?;

            let tensor = slice.to_dlpack_versioned();
            assert_eq!(tensor.capsule_name(), c"dltensor_versioned");
            let raw = tensor.into_raw();
            // SAFETY: a tensor that was just made.
            let found = unsafe { &*raw.cast::<DlManagedTensorVersioned>() };
            assert_eq!((found.version[0], found.flags), (1, 0));
            check(&found.dl_tensor, address, rank.device(), (code, bits));
            // SAFETY: the tensor is one that was exported, and nothing else takes it.
            same(context, unsafe { DlpackTensor::from_raw_versioned(raw) }?, &slice)?;
        }
        Ok(())
    });
}

fn check(tensor: &DlTensor, address: u64, device: usize, (code, bits): (u8, u8)) {
    assert_eq!((tensor.data, tensor.byte_offset), (address, 0));
    assert_eq!((tensor.device_type, tensor.device_id), (2, device as i32));
    assert_eq!((tensor.code, tensor.bits, tensor.lanes), (code, bits, 1));
    // SAFETY: one dimension.
    assert_eq!(unsafe { (tensor.ndim, *tensor.shape, *tensor.strides) }, (1, 3, 1));
}

fn same(context: &Context, tensor: DlpackTensor, slice: &DeviceSlice<Dynamic>) -> Result<()> {
    let found = DeviceSlice::from_dlpack_dynamic(context, tensor)?;
    let parts =
        |slice: &DeviceSlice<Dynamic>| (slice.device_address(), slice.len(), slice.data_type());
    assert_eq!(parts(&found), parts(slice));
    Ok(())
}

#[test]
fn memory_that_is_exported_stays_until_it_is_given_back_by_any_thread() {
    /// A tensor on the way to another thread.
    struct Sent(*mut c_void);
    // SAFETY: any thread may give back a tensor that this crate has exported.
    unsafe impl Send for Sent {}

    ranks(1, |rank| {
        let comm = rank.communicator()?;
        let machine = rank.simulated_machine().unwrap();
        let freed = || machine.calls().iter().filter(|call| call.function == "ncclMemFree").count();

        let memory = comm.mem_alloc::<f32>(4)?;
        let (first, second) =
            (memory.device_slice().to_dlpack(), memory.device_slice().to_dlpack());
        drop(memory);
        drop(first);
        assert_eq!(freed(), 0);
        drop(second);
        assert_eq!(freed(), 1);

        let tensor =
            Sent(comm.mem_alloc::<f32>(4)?.device_slice().to_dlpack_versioned().into_raw());
        let give_back = move || {
            // Without the braces the closure would capture the field alone, which is not `Send`.
            let Sent(raw) = { tensor };
            // SAFETY: the tensor that was just made.
            drop(unsafe { DlpackTensor::from_raw_versioned(raw) });
        };
        std::thread::spawn(give_back).join().unwrap();
        assert_eq!(freed(), 2);

        let owner = Arc::new(());
        let memory = comm.mem_alloc::<f32>(4)?;
        let exported = memory.device_slice().to_dlpack_with(Arc::clone(&owner), true);
        assert_eq!(Arc::strong_count(&owner), 2);
        drop(exported);
        assert_eq!(Arc::strong_count(&owner), 1);
        Ok(())
    });
}
