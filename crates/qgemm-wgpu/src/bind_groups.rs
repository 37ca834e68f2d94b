//! Bind group cache. Creating a bind group takes the host as
//! long as the rest of a launch.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use qgemm_hal::HalError;

use crate::pipeline::{Binding, Interface};
use crate::shared::Shared;

/// Maximum cached groups, for callers that bind different
/// buffer ranges at every launch.
const MOST_KEPT: usize = 4096;

/// Cached bind groups. A group is dropped with any of its
/// buffers, because it would keep the buffer's memory alive.
#[derive(Default)]
pub(crate) struct BindGroups {
    made: Mutex<HashMap<Key, wgpu::BindGroup>>,
}

/// Interface name, binding mode, and bound operands.
type Key = (&'static str, Binding, Vec<Operand>);

/// Bound range of a buffer.
#[derive(PartialEq, Eq, Hash)]
struct Operand {
    buffer: wgpu::Buffer,
    offset: u64,
    size: Option<wgpu::BufferSize>,
}

impl BindGroups {
    /// Drops the groups that contain `buffer`.
    pub fn forget(&self, buffer: &wgpu::Buffer) {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        made.retain(|(_, _, operands), _| operands.iter().all(|operand| operand.buffer != *buffer));
    }
}

/// The bind group of `bindings`, in the order of the
/// interface. `name` is for debuggers.
pub(crate) fn bind_group(
    shared: &Shared,
    interface: &Interface,
    how: Binding,
    name: &str,
    bindings: &[wgpu::BufferBinding<'_>],
) -> Result<wgpu::BindGroup, HalError> {
    let operand = |b: &wgpu::BufferBinding<'_>| Operand { buffer: b.buffer.clone(), offset: b.offset, size: b.size };
    let key = (interface.name, how, bindings.iter().map(operand).collect());
    let mut made = shared.groups.made.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(group) = made.get(&key) {
        return Ok(group.clone());
    }
    let group = shared.scoped("binding the operands of a kernel", || {
        let numbers = interface.bindings().map(|(binding, _)| binding);
        let entries: Vec<_> = numbers
            .zip(bindings)
            .map(|(binding, buffer)| wgpu::BindGroupEntry {
                binding,
                resource: wgpu::BindingResource::Buffer(buffer.clone()),
            })
            .collect();
        shared.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some(name),
            layout: &shared.pipelines.layout(interface, how).bindings,
            entries: &entries,
        })
    })?;
    if made.len() >= MOST_KEPT {
        made.clear();
    }
    made.insert(key, group.clone());
    Ok(group)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter::open_for_test;
    use crate::caller::shared_of;
    use crate::memory::WgpuBuffer;

    #[test]
    fn groups_are_made_once_and_go_with_their_buffers() {
        let Some(opened) = open_for_test() else { return };
        let shared = shared_of(&*opened).expect("our own");
        let [one, other] = [0; 2].map(|_| opened.allocate(64, "test").expect("small"));
        let bind = |buffer: &qgemm_hal::Buffer| {
            let raw = WgpuBuffer::of(shared, buffer.into(), "test").expect("our own");
            let interface = &crate::families::gemm::INTERFACE;
            let absent = interface.bindings().map(|_| shared.absent.as_entire_buffer_binding());
            let mut bindings: Vec<_> = absent.collect();
            bindings[0] = raw.buffer.as_entire_buffer_binding();
            bind_group(shared, interface, Binding::Apart, "test", &bindings).expect("valid")
        };
        let kept = || shared.groups.made.lock().expect("not poisoned").len();
        let first = bind(&one);
        assert!(first == bind(&one) && first != bind(&other) && kept() == 2);
        drop(one);
        assert_eq!(kept(), 1);
        drop(other);
        assert_eq!(kept(), 0);
    }
}
