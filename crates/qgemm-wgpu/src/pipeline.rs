//! Compiled shaders of a device, each made once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use qgemm_hal::HalError;

use crate::families::{PARAMS_BYTES, STORAGE_BUFFERS};
use crate::shader::Shader;
use crate::shared::Shared;

/// Binding of D, the only operand that is written.
const D_BINDING: u32 = STORAGE_BUFFERS - 1;

/// The one pipeline layout of all kernels, and the pipelines made so far by their source.
pub(crate) struct Pipelines {
    pub bindings: wgpu::BindGroupLayout,
    layout: wgpu::PipelineLayout,
    compiled: Mutex<HashMap<String, Arc<Mutex<Option<wgpu::ComputePipeline>>>>>,
}

impl Pipelines {
    pub fn new(device: &wgpu::Device) -> Self {
        let entries: Vec<_> = (0..STORAGE_BUFFERS)
            .map(|binding| wgpu::BindGroupLayoutEntry {
                binding,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer {
                    ty: wgpu::BufferBindingType::Storage { read_only: binding != D_BINDING },
                    has_dynamic_offset: false,
                    min_binding_size: None,
                },
                count: None,
            })
            .collect();
        let bindings = device
            .create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: Some("operands"), entries: &entries });
        let layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some("gemm"),
            bind_group_layouts: &[Some(&bindings)],
            immediate_size: PARAMS_BYTES,
        });
        Self { bindings, layout, compiled: Mutex::new(HashMap::new()) }
    }
}

/// The pipeline of `shader`, compiled where it has not been before. `name` is for errors and debuggers.
pub(crate) fn pipeline(shared: &Shared, name: &str, shader: Shader) -> Result<wgpu::ComputePipeline, HalError> {
    let Shader { source, prelude } = shader;
    let place = {
        let mut compiled = shared.pipelines.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(compiled.entry(source.clone()).or_default())
    };
    // Whoever wants the same meanwhile waits; others do not.
    let mut place = place.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(pipeline) = &*place {
        return Ok(pipeline.clone());
    }
    let _span = tracing::info_span!("compile", kernel = name).entered();
    let made = shared.try_scoped("compiling a kernel", || {
        let description = wgpu::ShaderModuleDescriptor {
            label: Some(name),
            source: wgpu::ShaderSource::Wgsl(source.as_str().into()),
        };
        // SAFETY: the text is our own. Every access to a buffer is within what a launch binds: rows of W are clamped to
        // the last tile, tokens to the last of X, columns of X and the column order are compared with `stored_k`,
        // positions in C, bias, scales, residual and D with N and M; and `Operand::bind` refuses views that are
        // shorter than the extents of all of those, from which the strides come, too. Entries of the column order are
        // below K or skipped, which `HostWeight` and packed files check. X that is read without comparing columns has
        // whole steps of them (`staging::staged_x`), and a copy of X has room for all that is written (`Staging`).
        // Workgroup memory is indexed by constants of the tile. Every loop counts to such a bound in steps of at least
        // 1.
        let module =
            unsafe { shared.device.create_shader_module_trusted(description, wgpu::ShaderRuntimeChecks::unchecked()) };
        shared.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(name),
            layout: Some(&shared.pipelines.layout),
            module: &module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions {
                // Our kernels write all of it before they read any.
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache: None,
        })
    })?;
    let pipeline = made.map_err(|fault| HalError::Compile {
        kernel: name.to_owned(),
        target: format!("{} (WGSL)", shared.id),
        options: prelude.lines().collect::<Vec<_>>().join(" "),
        log: fault.into_message(),
    })?;
    Ok(place.insert(pipeline).clone())
}
